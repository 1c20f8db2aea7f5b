"""Rows and columns of images whose sizes change, or that devices do not divide, stay split: values and plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import Traced
from autopar.ir import Graph
from autopar.lower.padded import padded
from autopar.search import techniques
from autopar.sharding.padding import candidates, classes
from tests.end_to_end.test_space import crops
from tests.end_to_end.test_uneven_sizes import drawn, run_padded
from tests.search.problems import toy

IMAGES = ("NHWC", "HWIO", "NHWC")
KINDS = (
    "valid", "strided", "largest", "sums", "dilated", "transposed", "zeros", "ones", "cut", "skip", "every other",
    "by channel", "rolled", "rolled back",
)  # fmt: skip


def conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    given = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=IMAGES, **given)


def part(x: jax.Array, p: Any, kind: str) -> jax.Array:
    """What changes the size in the middle of a net."""
    if kind == "strided":
        return conv(x, p["a"], window_strides=(2, 2))
    if kind == "largest":
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    if kind == "sums":
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    if kind == "dilated":
        return conv(x, p["a"], rhs_dilation=(2, 2), padding="VALID")
    if kind == "transposed":
        return lax.conv_transpose(x, p["a"], (2, 2), "SAME", dimension_numbers=IMAGES)
    if kind in ("zeros", "ones"):
        return jnp.pad(x, ((0, 0), (2, 1), (0, 3), (0, 0)), constant_values=float(kind == "ones"))
    if kind == "cut":
        return x[:, 1:-2, 2:]
    if kind == "skip":
        return x[:, 2:-2, 2:-2] + conv(conv(x, p["a"], padding="VALID"), p["b"], padding="VALID")
    if kind == "every other":
        return x[:, 1::2, ::2]
    if kind in ("rolled", "rolled back"):
        return conv(x + jnp.roll(x, (1, -2) if kind == "rolled" else (-1, 3), (1, 2)), p["a"])
    return conv(x, p["each"], feature_group_count=4) if kind == "by channel" else x


def step_of(kind: str) -> Any:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(part(jnp.tanh(conv(x, p["in"], padding="VALID")), p, kind))
        y = conv(y, p["b"])
        centred = y - y.mean((1, 2), keepdims=True)
        return (conv(centred * lax.rsqrt((centred**2).mean((1, 2), keepdims=True) + 1e-5), p["b"]) ** 2).mean()

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step


def arguments(height: int, width: int, batch: int = 2) -> tuple[Any, jax.Array]:
    shapes = {"in": (3, 3, 3, 4), "a": (3, 3, 4, 4), "b": (3, 3, 4, 4), "each": (3, 3, 1, 4)}
    return {n: 0.5 * drawn(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}, drawn(batch, height, width, 3)


def traced_of(step: Any, args: Any) -> Traced:
    pure = autopar.parallelize(step, cluster=toy(8))._plain
    return pure.traced(pure.resolve(args, {})[0])


@pytest.mark.few(6)
@pytest.mark.parametrize("size", [(14, 17), (16, 16), (19, 30)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_without_padding(kind: str, size: tuple[int, int]) -> None:
    with jax.enable_x64(True):
        args = arguments(*size)
        got, count = run_padded(step_of(kind), args, 8, 2.0)
        assert count >= 2
        want = jax.jit(step_of(kind))(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, want)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ones"])
def test_rows_of_a_chain_are_padded_together(kind: str) -> None:
    """All images of a net are of one class, and eight devices divide the rows and columns of all convolutions."""
    traced = traced_of(step_of(kind), arguments(19, 30))
    graph = traced.graph
    (image,) = (i.name for i in graph.inputs if i.type.shape == (2, 19, 30, 3))
    rows, columns = (next(c for c in classes(graph) if (image, d) in c) for d in (1, 2))
    chosen = [c for c in candidates(graph, 8, 1.0) if {(image, 1), (image, 2)} & set(c.places)]
    form = padded(traced, [d for c in chosen for d in c.dims(graph)]).graph
    images = [op.results[0] for op in graph.operators if op.primitive == "conv_general_dilated"]
    images = [v for v in images if v.type.shape[0] == 2]
    assert len(images) >= 4
    assert {(v.name, 1) for v in images} <= set(rows) and {(v.name, 2) for v in images} <= set(columns)
    made = [op.results[0].type.shape for op in form.operators if op.primitive == "conv_general_dilated"]
    made = [shape for shape in made if shape[0] == 2]
    rolled = [op.results[0].type.shape for op in form.operators if op.primitive == "roll"]
    assert bool(rolled) == kind.startswith("rolled") and all(n % 8 == 0 for shape in rolled for n in shape[1:3])
    assert len(made) == len(images) and all(n % 8 == 0 for shape in made for n in shape[1:3])


def test_windows_of_other_steps_over_the_same_rows_are_padded_apart() -> None:
    """No shards of rows have edges of neighbours alone under windows of steps of 1 and of 2 that are added up."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        half = conv(x, w, window_strides=(2, 1))
        return conv(x, w)[:, : half.shape[1]] + half

    graph = traced_of(step, (drawn(3, 3, 3, 3), drawn(1, 30, 8, 3))).graph
    sizes = [{graph.types[name].shape[d] for name, d in c} for c in classes(graph)]
    assert not any({15, 30} <= s for s in sizes)
    assert any(size == 32 for c in candidates(graph, 8, 0.34) for _, _, size in c.dims(graph))


@pytest.mark.parametrize("rows", [8, 10])
def test_rows_of_several_units_are_padded_in_the_ratio_of_windows(rows: int) -> None:
    """Rows that are split in two elsewhere are two units each; windows of three of them are pooled."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ w)
            pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 1), (1, 3, 1), "SAME")
            return (pooled**2).sum() + (jnp.tanh(y.reshape(len(y), rows // 2, -1).sum(0)) ** 2).sum()

        return jax.value_and_grad(loss)(w)

    with jax.enable_x64(True):
        args = drawn(4, 4), drawn(5, rows, 4)
        got, _ = run_padded(step, args, 7, 9.0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, jax.jit(step)(*args))


def chain(p: Any, x: jax.Array) -> Any:
    """A step of convolutions without padding, on few images."""

    def loss(p: Any) -> jax.Array:
        y = x
        for w in p:
            y = jnp.tanh(conv(y, w, padding="VALID"))
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def test_a_chain_of_convolutions_without_padding_is_planned_split() -> None:
    """Rows or columns are split over all devices from the first convolution to the last, and values are right."""
    with jax.enable_x64(True):
        args = [0.2 * drawn(3, 3, n, 8, seed=i) for i, n in enumerate((3, 8, 8))], drawn(1, 64, 64, 3)
        run = autopar.parallelize(chain, cluster=toy(8), num_stages=1, num_microbatches=1)
        plan = run.plan(*args)
        assert plan.stages[0].form.padded
        assert any("(58), and all that is split with it, is padded to 64" in note for note in plan.notes)
        whole = autopar.parallelize(chain, cluster=toy(8), num_stages=1, num_microbatches=1, padding=False)
        assert plan.step_time < whole.plan(*args).step_time
        got, want = run(*args), jax.jit(chain)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, want)


def predicted_s(step: Any, args: Any, *joined: bool) -> float:
    """Predicted seconds of a step whose classes are padded as a whole (True) or in parts (False), or as is faster."""

    def some(graph: Graph, shards: int, most_waste: float, *, joined: bool) -> Any:
        return candidates(graph, shards, most_waste, joined=joined) if joined in ways else ()

    ways = joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(techniques, "candidates", some)
        run = autopar.parallelize(step, cluster=toy(8), num_stages=1, num_microbatches=1, remat="none")
        return run.plan(*args).step_time


def test_parts_of_a_class_are_padded_alone_where_that_is_faster() -> None:
    """Six columns, and three features of a convolution; a convolution computes none of the padding then."""

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w, x: jnp.sum(crops(x, w) ** 2), (0, 1))(w, x)

    with jax.enable_x64(True):
        args = drawn(3, 3, 3, 3), drawn(1, 64, 6, 3)
        assert predicted_s(step, args, True, False) < 0.95 * predicted_s(step, args, True)
        run = autopar.parallelize(step, cluster=toy(8), num_stages=1, num_microbatches=1)
        assert run.plan(*args).stages[0].form.padded
        got, want = run(*args), jax.jit(step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, want)


def drawn_net(seed: int) -> tuple[Any, Any]:
    """A step and its arguments, the same for the same seed."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        layers, side = int(rng.integers(2, 5)), int(rng.integers(20, 80))
        weights = [0.2 * drawn(3, 3, n, 8, seed=i) for i, n in enumerate((3, *[8] * layers))]
        return chain, (weights, drawn(1, side, side, 3))
    height, width = (int(n) for n in rng.integers(12, 48, 2))
    return step_of(str(rng.choice(KINDS))), arguments(height, width, int(rng.integers(1, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_drawn_nets_are_never_slower_than_padded_either_way(seed: int) -> None:
    """By predicted seconds."""
    step, args = drawn_net(seed)
    both, *alone = (predicted_s(step, args, *ways) for ways in ((True, False), (True,), (False,)))
    assert both <= (1 + 1e-9) * min(alone), (both, alone)
