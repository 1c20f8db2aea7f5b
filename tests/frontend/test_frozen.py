"""Arguments of a train step that are a model which is not trained are no batch: the base of adapters, a teacher."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same

LAYERS, SIZE = 3, 16
X = jax.random.normal(jax.random.key(0), (8, SIZE))
Y = jax.random.normal(jax.random.key(1), (8, SIZE))


def trained(loss):
    def step(params, *rest):
        value, grads = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), value

    return step


def adapters():
    return [{"a": jnp.full((SIZE, 2), 0.1), "b": jnp.full((2, SIZE), 0.1)} for _ in range(LAYERS)]


def base(dtype):
    return [jnp.ones((SIZE, SIZE), dtype) for _ in range(LAYERS)]


def beside(p, q, x, y):
    h = x
    for w, a in zip(q, p, strict=True):
        h = h + jnp.tanh(h @ (w.astype(jnp.float32) * 0.02) + h @ a["a"] @ a["b"])
    return jnp.mean((h - y) ** 2)


def merged(p, q, x, y):
    h = x
    for w, a in zip(q, p, strict=True):
        h = jnp.tanh(h @ (w + a["a"] @ a["b"]))
    return jnp.mean((h - y) ** 2)


def scanned(p, q, x, y):
    def layer(h, w):
        return h + jnp.tanh(h @ w[0] + h @ w[1]["a"] @ w[1]["b"]), None

    h, _ = lax.scan(layer, x, (q, p))
    return jnp.mean((h - y) ** 2)


def network(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def taught(p, q, x, y):
    return jnp.mean((network(p, x) - network(q, x)) ** 2) + jnp.mean(y)


def convolved(p, q, x, y):
    def conv(h, w):
        return lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    h = conv(jax.nn.relu(conv(x, q[0])), q[1])
    return jnp.mean((h @ p - y) ** 2)


def indexed(p, q, x, y):
    h = x
    for i, a in enumerate(p):
        h = h + jnp.tanh(h @ q[i] + h @ a["a"] @ a["b"])
    return jnp.mean((h - y) ** 2)


def from_the_end(p, q, x, y):
    h = x
    for i, a in enumerate(p):
        h = h + jnp.tanh(h @ q["w"][-1 - i].astype(jnp.float32) + q["b"][-1 - i] + h @ a["a"] @ a["b"])
    return jnp.mean((h - y) ** 2)


def unstacked(p, q, x, y):
    h = x
    for w, more, a in zip(q[0], jnp.unstack(q[1]), p, strict=True):
        h = h + jnp.tanh((h @ w) @ more + h @ a["a"] @ a["b"])
    return jnp.mean((h - y) ** 2)


def counted(p, q, x, y):
    def layer(i, h):
        return h + jnp.tanh(h @ q[i] + h @ p["a"][i] @ p["b"][i])

    return jnp.mean((lax.fori_loop(0, LAYERS, layer, x) - y) ** 2)


def taken(p, q, x, y):
    h = x
    for i, a in enumerate(p):
        h = h + jnp.tanh(h @ jnp.take(q, i, axis=0) + h @ a["a"] @ a["b"])
    return jnp.mean((h - y) ** 2)


STACKED = jax.tree.map(lambda *a: jnp.stack(a), *adapters())
NETWORK = {"a": jnp.ones((SIZE, 32)), "b": jnp.ones((32, SIZE))}
IMAGES = jnp.ones((8, 4, 4, 2))
KERNELS = [jnp.full((3, 3, 2, 2), 0.1), jnp.full((3, 3, 2, 2), 0.2)]
FROZEN = {
    "int4": (beside, adapters(), base(jnp.int4), X, Y),
    "merged": (merged, adapters(), base(jnp.float32), X, Y),
    "indexed": (indexed, adapters(), jnp.stack(base(jnp.float32)), X, Y),
    "from the end": (
        from_the_end,
        adapters(),
        {"w": jnp.stack(base(jnp.int8)), "b": jnp.ones((LAYERS, SIZE))},
        X,
        Y,
    ),
    "unstacked": (unstacked, adapters(), (jnp.stack(base(jnp.float32)), jnp.stack(base(jnp.float32))), X, Y),
    "counted": (counted, STACKED, jnp.stack(base(jnp.float32)), X, Y),
    "taken": (taken, adapters(), jnp.stack(base(jnp.float32)), X, Y),
    "scan": (scanned, STACKED, jnp.stack(base(jnp.float32)), X, Y),
    "teacher": (taught, NETWORK, NETWORK, X, Y),
    "conv": (convolved, jnp.ones((2, 2)), KERNELS, IMAGES, IMAGES),
}


def examples_first(p, x, y):
    return jnp.mean((x @ p - y) ** 2)


def features_first(p, x, y):
    return jnp.mean((p.T @ jnp.tanh(p.T @ x.T) - y.T) ** 2)


def contrastive(p, x, y):
    return -jnp.mean(jax.nn.log_softmax((x @ p) @ (y @ p).T).diagonal())


def chunked(p, xs, ys):
    def one(total, chunk):
        return total + jnp.mean((jnp.tanh(chunk[0] @ p) @ p - chunk[1]) ** 2), None

    return lax.scan(one, 0.0, (xs, ys))[0]


def chunk_by_chunk(p, xs, ys):
    return sum(jnp.mean((jnp.tanh(xs[i] @ p) @ p - ys[i]) ** 2) for i in range(len(xs)))


def pairs(p, xs, ys):
    return jnp.mean((xs[0] @ p - xs[1] @ p) ** 2) + jnp.mean(ys[0] - ys[1])


W, CHUNKS = jnp.eye(SIZE), X.reshape(2, 4, SIZE)
BATCHES = {
    "plain": (examples_first, W, X, Y),
    "features first": (features_first, W, X, Y),
    "contrastive": (contrastive, W, X, Y),
    "chunks": (chunked, W, CHUNKS, CHUNKS),
    "chunks in Python": (chunk_by_chunk, W, CHUNKS, CHUNKS),
    "pairs": (pairs, W, CHUNKS, CHUNKS),
}


def roles(step, *args):
    """Roles of the leaves of each argument but the first."""
    plan = autopar.parallelize(step, cluster=CLUSTER).plan(*args)
    found = [{i.role for i in plan.content.inputs if i.path.startswith(f"arg{n}")} for n in range(1, len(args))]
    return [role for (role,) in found]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FROZEN)
def test_a_model_that_is_not_trained_is_no_batch(name):
    loss, *args = FROZEN[name]
    assert roles(trained(loss), *args) == ["parameter", "batch", "batch"]


@pytest.mark.parametrize("name", BATCHES)
def test_examples_stay_a_batch(name):
    loss, *args = BATCHES[name]
    assert roles(trained(loss), *args) == ["batch", "batch"]


@pytest.mark.parametrize(
    "options",
    [pytest.param({"num_microbatches": 4}, marks=pytest.mark.slow), {"num_microbatches": 2, "num_stages": 2}],
)
def test_adapters_are_trained_in_microbatches_and_stages(options):
    step = trained(beside)
    args = FROZEN["int4"][1:]
    assert_trees_same(autopar.parallelize(step, cluster=CLUSTER, **options)(*args), jax.jit(step)(*args))
