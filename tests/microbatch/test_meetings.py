"""Steps whose examples meet run in several loops over microbatches, with the values of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import MicrobatchError
from autopar.microbatch import analyze, analyze_in_loops
from tests.microbatch.running import assert_same_in_microbatches, step_of, traced


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def encoded(p, x, layers=2):
    for n in range(layers):
        x = jnp.tanh(x @ p[f"w{n}"])
    return x


def contrastive(p, x):
    """CLIP's loss: images against texts of the whole batch."""
    image, text = encoded(p["image"], x["image"]), encoded(p["text"], x["text"])
    image = image / jnp.linalg.norm(image, axis=1, keepdims=True)
    text = text / jnp.linalg.norm(text, axis=1, keepdims=True)
    scores = image @ text.T * jnp.exp(p["temperature"])
    rows, columns = jax.nn.log_softmax(scores, 0), jax.nn.log_softmax(scores, 1)
    return -jnp.mean(jnp.diagonal(rows) + jnp.diagonal(columns))


def balanced(p, x):
    """Switch's balance loss over the global batch, in each of two layers of experts."""
    h, loss = x["x"] @ p["in"], 0.0
    for n in range(2):
        probabilities = jax.nn.softmax(h @ p[f"gate{n}"])
        taken = jax.nn.one_hot(jnp.argmax(probabilities, -1), probabilities.shape[-1], dtype=h.dtype)
        loss += 0.1 * jnp.sum(taken.mean(0) * probabilities.mean(0)) * probabilities.shape[-1]
        loss += 0.1 * jnp.var((taken * probabilities).sum(0)) / jnp.mean(probabilities.sum(0)) ** 2
        h = h + jnp.einsum("be,eij,bi->bj", taken * probabilities, p[f"expert{n}"], h)
    return loss + jnp.mean((h @ p["out"] - x["y"]) ** 2)


def batch_norm(p, x):
    """One norm with the statistics of the whole batch."""
    h = x["x"] @ p["in"]
    mean, square = h.mean(0), (h * h).mean(0)
    h = (h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5) * p["scale"]
    return jnp.mean((jnp.tanh(h) @ p["out"] - x["y"]) ** 2)


def decorrelated(p, x):
    """Barlow twins: the correlation of features over the whole batch."""
    a, b = encoded(p["image"], x["image"]), encoded(p["image"], x["text"])
    a, b = (z - z.mean(0) for z in (a, b))
    c = a.T @ b / a.shape[0]
    return jnp.sum((jnp.diagonal(c) - 1) ** 2) + 0.01 * jnp.sum(c**2)


def linear_head(p, x):
    """Scores of what comes out of matrices, as in dense retrieval: no norm between them and what meets."""
    image, text = (jnp.tanh(x[k] @ p[k]["w0"]) @ p[k]["w1"] for k in ("image", "text"))
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(image @ text.T)))


def pairs():
    tower = {"w0": draw(0, 6, 8), "w1": draw(1, 8, 4)}
    params = {"image": tower, "text": jax.tree.map(lambda w: -0.7 * w[::-1], tower), "temperature": jnp.asarray(0.3)}
    return params, {"image": draw(2, 12, 6), "text": draw(3, 12, 6)}


def labelled():
    params = {"in": draw(4, 6, 8), "out": draw(5, 8, 3), "scale": draw(6, 8)}
    params |= {f"gate{n}": draw(7 + n, 8, 4) for n in range(2)} | {f"expert{n}": draw(9 + n, 4, 8, 8) for n in range(2)}
    return params, {"x": draw(11, 12, 6), "y": draw(12, 12, 3)}


LOSSES = [
    (contrastive, pairs, (2, 12), 2),
    (decorrelated, pairs, (3,), 4),
    (linear_head, pairs, (3,), 2),
    (balanced, labelled, (4,), 2),
    (batch_norm, labelled, (6,), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "arguments", "counts", "loops"), LOSSES, ids=[loss.__name__ for loss, *_ in LOSSES])
def test_values_are_those_of_the_whole_batch(loss, arguments, counts, loops):
    with jax.enable_x64(True):
        plain = assert_same_in_microbatches(step_of(loss), arguments(), counts, rtol=1e-11)
    with pytest.raises(MicrobatchError):
        analyze(plain.graph, 2)
    assert len(analyze_in_loops(plain.graph, 2)) == loops


def test_what_meets_is_as_small_as_it_can_be():
    plain, _ = traced(step_of(balanced), labelled())
    first, last = analyze_in_loops(plain.graph, 4)
    joined = {j.name for j in first.microbatching.joined}
    assert max(plain.graph.types[n].size for n in joined) == 4  # an entry an expert, nothing of an example
    assert joined <= {i.name for i in last.graph.inputs}
    plain, _ = traced(step_of(contrastive), pairs())
    first, _ = analyze_in_loops(plain.graph, 4)
    assert [plain.graph.types[j.name].size for j in first.microbatching.joined] == [12 * 4, 12 * 4]


def deep(p, x):
    """More norms than there may be loops."""
    h = x["x"] @ p["in"]
    for _ in range(4):
        h = jnp.tanh((h - h.mean(0)) * p["scale"])
    return jnp.mean((h @ p["out"] - x["y"]) ** 2)


def stacked(p, x):
    """A norm in a loop over layers."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh((h - h.mean(0)) @ w), None), x["x"] @ p["in"], p["expert0"])
    return jnp.mean((h @ p["out"] - x["y"]) ** 2)


@pytest.mark.parametrize("loss", [deep, stacked])
def test_others_stay_as_they_are(loss):
    plain, _ = traced(step_of(loss), labelled())
    with pytest.raises(MicrobatchError, match=rf"test_meetings\.py:[0-9]+(:[0-9]+)? \({loss.__name__}\)"):
        analyze_in_loops(plain.graph, 2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("loss", "arguments", "remat"),
    [(contrastive, pairs, "none"), (contrastive, pairs, "full"), (balanced, labelled, "full")],
)
def test_on_devices(loss, arguments, remat):
    """Recomputation, several devices, the note."""
    params, batch = jax.tree.map(lambda a: a.astype("float32"), arguments())
    step = step_of(loss)
    wanted = jax.jit(step)(params, batch)
    fn = autopar.parallelize(step, num_microbatches=3, num_stages=1, mesh_shape=(8,), remat=remat)
    got = fn(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)
    (note,) = (n for n in fn.plan(params, batch).notes if "microbatches" in n)
    assert note.startswith("examples meet: 2 loops over the microbatches")


@pytest.mark.slow
def test_memory_falls():
    """A limit below what one loop takes has a plan in several."""

    def loss(p, x):
        h = encoded(p, x["x"], 6)
        return jnp.mean(jnp.tanh(h / jnp.sqrt(jnp.mean(h**2))))

    params = {f"w{n}": jnp.ones((16, 16)) for n in range(6)}
    step, batch = step_of(loss), {"x": jnp.ones((4096, 16))}
    free = autopar.parallelize(step, mesh_shape=(8,)).plan(params, batch)
    short = autopar.parallelize(step, mesh_shape=(8,), memory_limit=free.peak_memory // 2).plan(params, batch)
    assert free.num_microbatches == 1 < short.num_microbatches
    assert short.peak_memory <= free.peak_memory // 2
    assert any(n.startswith("examples meet: 3 loops") for n in short.notes)
