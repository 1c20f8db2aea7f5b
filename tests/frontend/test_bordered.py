"""Borders that are made of the array itself are folded into convolutions, and rolls are one operator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._compat.primitives import bind
from autopar.frontend.bordered import bordered_p
from autopar.frontend.build import build_graph
from autopar.ir import Graph
from autopar.lower.localize.base import scalar
from autopar.sharding.halo import Halo
from tests.search.problems import f32, problem_of, toy

NUMBERS = ("NHWC", "HWIO", "NHWC")


def graph_of(function: Any, *args: Any) -> Graph:
    return problem_of(function, args, toy(8)).graph


def convolved(x: jax.Array, w: jax.Array, mode: str, pads: tuple[tuple[int, int], ...], **options: Any) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)), mode=mode)  # type: ignore[arg-type]
    return lax.conv_general_dilated(padded, w, (1, 1), "VALID", dimension_numbers=NUMBERS, **options)


def borders_of(graph: Graph) -> list[Any]:
    return [dict(op.attrs).get("borders") for op in graph.operators if op.primitive == "conv_general_dilated"]


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap"])
def test_forward_and_backward_borders_are_parameters(mode: str) -> None:
    """The convolution, the gradient of its kernel, and that of its operand."""

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w, x: jnp.sin(convolved(jnp.tanh(x), w, mode, ((1, 1), (2, 0)))).sum(), (0, 1))(w, x)

    graph = graph_of(step, f32(3, 3, 4, 2), f32(1, 32, 32, 4))
    around = ((mode, "in", 1, 1), (mode, "in", 2, 0))
    back = ((mode, "in", 1, 1), (mode, "in", 0, 2)) if mode == "wrap" else ((mode, "out", 1, 1), (mode, "out", 2, 0))
    assert borders_of(graph) == [around, around, back]
    assert not {op.primitive for op in graph.operators} & {"concatenate", "pad", "slice", "split"}


def crossed(x: jax.Array) -> jax.Array:
    """Rows of the other end, not in the order of any padding."""
    return jnp.concatenate([x[:, 5:6], x, x[:, 2:3]], 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: lax.conv_general_dilated(crossed(x), w, (1, 1), "VALID", dimension_numbers=NUMBERS),
        lambda x, w: lax.conv_general_dilated(
            jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="wrap"), w, (1, 1), "SAME", dimension_numbers=NUMBERS
        ),
        lambda x, w: jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="reflect") * w.sum(),
    ],
    ids=["other rows", "zeros around", "no convolution"],
)
def test_other_arrays_keep_their_concatenations(function: Any) -> None:
    graph = graph_of(function, f32(1, 32, 32, 4), f32(3, 3, 4, 2))
    assert any(op.primitive == "concatenate" for op in graph.operators)
    assert borders_of(graph) in ([None], [])


def test_a_gradient_that_is_read_before_its_borders_go_back_is_not_folded() -> None:
    def step(w: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), ((2, 2), (1, 1)), dimension_numbers=NUMBERS)
        return y[:, 1:-1].at[:, 1].add(y[:, 0]).at[:, -2].add(y[:, -1]), y.sum()

    assert borders_of(graph_of(step, f32(3, 3, 4, 2), f32(1, 32, 32, 4))) == [None]


@pytest.mark.parametrize("mode", ["reflect", "wrap"])
def test_whole_arrays_have_the_values_of_jax(mode: str) -> None:
    """Programs of one device run the primitives as they are, and loops over examples batch them."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            rolled = jnp.roll(jnp.tanh(x), (1, -2), (1, 2))
            return jnp.sin(convolved(rolled, w, mode, ((1, 1), (2, 0)))).sum()

        return jax.grad(loss, (0, 1))(w, x)

    w, x = (jnp.sin(jnp.arange(n, dtype=jnp.float32)) for n in (3 * 3 * 2 * 2, 2 * 8 * 8 * 2))
    args = w.reshape(3, 3, 2, 2), x.reshape(2, 8, 8, 2)
    bound = build_graph(jax.make_jaxpr(step)(*args), "step")
    assert any(b.primitive is bordered_p for b in bound.bounds.values())

    def run(w: jax.Array, x: jax.Array) -> list[Any]:
        env = dict(zip((i.name for i in bound.graph.inputs), (w, x), strict=True))
        for op in bound.graph.operators:
            at = bound.bounds[op.id]
            operands = [env[o] if isinstance(o, str) else scalar(o) for o in op.operands]
            env |= dict(zip((v.name for v in op.results), bind(at.primitive, at.params, operands), strict=True))
        return [env[str(o.operand)] for o in bound.graph.outputs]

    for got, want in zip(jax.jit(run)(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-5)
    each = jax.jit(jax.vmap(run, (None, 0)))(args[0], jnp.stack([args[1], 2 * args[1]]))
    for got, want in zip(each, jax.jit(step)(args[0], 2 * args[1]), strict=True):
        np.testing.assert_allclose(got[1], want, 1e-4, 1e-4)


def test_rolls_and_their_gradients_are_operators() -> None:
    def step(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(jnp.roll(jnp.tanh(x), (1, -2), (1, 2))).sum())(x)

    graph = graph_of(step, f32(1, 32, 32, 4))
    rolls = [(op.integer("dim"), op.integer("shift")) for op in graph.operators if op.primitive == "roll"]
    assert rolls == [(1, 1), (2, -2), (2, 2), (1, -1)]
    assert not {op.primitive for op in graph.operators} & {"concatenate", "pad", "slice"}


def test_half_of_an_array_before_the_other_half_is_a_roll_that_few_devices_split() -> None:
    """A device has edges of those next to it alone."""
    graph = graph_of(lambda x: jnp.concatenate([x[16:], x[:16]]) * 2, f32(32, 8))
    (roll,) = (op for op in graph.operators if op.primitive == "roll")
    halo = Halo(32, 32, 1, 1, roll.integer("shift"), wraps=True)
    assert halo.reach(2) is not None and halo.reach(4) is None


def test_shards_that_have_too_little_for_borders_are_none() -> None:
    halo = Halo.sliding(16, 16, 5, (1, 1, 1), 2)
    assert halo.reach(8) is not None
    assert Halo(16, 16, 1, 5, 2, least=3).reach(8) is None and Halo(16, 16, 1, 5, 2, least=3).reach(4) is not None
