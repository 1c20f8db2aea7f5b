"""Loops over layers in segments: values of the plain step, what is kept, and which loops stay as they are."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir import Graph, Operator
from autopar.ir.layer_loops import is_segmented, loop_pairs, replaced_in_place, segment_lengths, sliced_inside
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.lower.layer_techniques import in_segments, updated_in_backward
from tests.lower.test_backward_update import model
from tests.microbatch.running import assert_same_in_microbatches, run, step_of, traced

LAYERS, WIDTH = 6, 4


def scanned(body: Any, *, remat: bool, reverse: bool = False) -> Any:
    """A loss of (parameters, examples) that scans ``body`` of (activations, parameters of a layer) over layers."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y, more = jax.lax.scan(jax.checkpoint(body) if remat else body, x, p, reverse=reverse)
        return jnp.mean(y**2) + (0.0 if more is None else jnp.mean(more))

    return loss


def plain_layer(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
    return y + jnp.tanh(y @ p["w"]) * p["s"], None


def dropping_layer(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
    """With a mask of its own that the parameters' number decides."""
    key = jax.random.fold_in(jax.random.key(3), p["n"].astype(jnp.int32))
    kept = jax.random.bernoulli(key, 0.7, y.shape[1:])
    return y + jnp.where(kept, jnp.tanh(y @ p["w"]), 0.0) * p["s"], None


def reporting_layer(y: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
    """Which returns a value of its own."""
    after, _ = plain_layer(y, p)
    return after, jnp.mean(after**3, axis=-1)


def arguments(layers: int = LAYERS, examples: int = 4) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    p = {
        "w": 0.5 * jax.random.normal(keys[0], (layers, WIDTH, WIDTH), jnp.float64),
        "s": 1.0 + 0.1 * jax.random.normal(keys[1], (layers, WIDTH), jnp.float64),
        "n": jnp.arange(layers, dtype=jnp.float64),
    }
    return p, jax.random.normal(keys[2], (examples, WIDTH), jnp.float64)


def loops(graph: Graph) -> list[Operator]:
    """Loops of segments of a step."""
    return [op for op in graph.operators if is_segmented(op)]


def assert_same(step: Any, args: Any, layers: int, *, update: bool = False) -> Graph:
    """The step in segments returns what ``step`` does; its graph."""
    plain, leaves = traced(step, args)
    before = updated_in_backward(plain) if update else plain
    rewritten = in_segments(before, layers)
    assert rewritten is not before
    for a, b in zip(run(rewritten, leaves), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    return rewritten.graph


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("layers", "reverse"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("body", [plain_layer, dropping_layer, reporting_layer])
def test_values(x64: None, body: Any, remat: bool, layers: int, reverse: bool) -> None:
    step = step_of(scanned(body, remat=remat, reverse=reverse))
    forward, backward = loops(assert_same(step, arguments(), layers))
    assert phase_of(forward) == "forward" and phase_of(backward) == "backward"
    assert Scan.of(forward).length == Scan.of(backward).length == LAYERS // layers
    inner = loops(backward.region("body"))
    assert [Scan.of(op).length for op in inner] == ([] if layers == 1 else [layers, layers])


@pytest.mark.few(3)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("body", [plain_layer, dropping_layer, reporting_layer])
def test_microbatches(x64: None, body: Any, remat: bool, layers: int) -> None:
    step = step_of(scanned(body, remat=remat))
    assert_same_in_microbatches(step, arguments(), (2, 4), rtol=1e-10, rewrite=lambda t: in_segments(t, layers))


@pytest.mark.slow
@settings(max_examples=8)
@given(
    layers=st.integers(2, 12),
    divisor=st.integers(0, 5),
    remat=st.booleans(),
    update=st.booleans(),
    tied=st.booleans(),
    average=st.booleans(),
)
def test_drawn_models(layers: int, divisor: int, update: bool, **options: Any) -> None:
    """Any number of layers in any segments, with the update behind the backward loop and inside of it."""
    lengths = [k for k in range(1, layers) if layers % k == 0]
    k = lengths[divisor % len(lengths)]
    with jax.enable_x64(True):
        step, args = model(optax.adam(1e-2, eps=1e-4), layers=layers, **options)
        assert_same(step, args, k, update=update)


@pytest.mark.few(2)
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_what_is_kept(x64: None, remat: bool, layers: int) -> None:
    """What enters each segment, and in a segment what its layers leave: l/k + k of them in place of l."""
    step, args = model(optax.sgd(1e-2), layers=LAYERS, remat=remat)
    (pair,) = loop_pairs(traced(step, args)[0].graph)
    assert (pair.entering_bytes == pair.left_bytes) == remat
    graph = assert_same(step, args, layers)
    forward, backward = loops(graph)
    stacks = [v.type for v in forward.results[Scan.of(forward).num_carry :]]
    kept = sum(t.nbytes for t in stacks)
    assert [t.shape[0] for t in stacks] == [LAYERS // layers]
    if layers > 1:
        again = Scan.of(loops(backward.region("body"))[0])
        kept += again.length * sum(o.type.nbytes for o in again.body.outputs[again.num_carry :])
    else:
        kept += pair.left_bytes
    assert kept == pair.kept_bytes(layers) <= (LAYERS + 1) * pair.left_bytes


@pytest.mark.parametrize("layers", [1, 2])
def test_stacks_of_state_are_written_where_they_lie(x64: None, layers: int) -> None:
    graph = assert_same(*model(optax.adam(1e-2), layers=4), layers, update=True)
    _, backward = loops(graph)
    stacks = {i.name for i in graph.inputs if "['layers']" in i.name}
    assert {backward.operands[n] for n in replaced_in_place(graph, backward)} == stacks
    if layers > 1:  # no loop takes a slice of a slice: rows of the whole stack alone
        assert {backward.operands[n] for n in sliced_inside(backward)} == stacks


@pytest.mark.slow
def test_a_stack_that_something_else_reads_is_kept(x64: None) -> None:
    def loss(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(y: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            after, _ = plain_layer(y, p)
            return after, y

        y, entering = jax.lax.scan(layer, x, p)
        return jnp.mean(y**2), entering

    def step(p: Any, x: jax.Array) -> Any:
        (value, entering), g = jax.value_and_grad(loss, has_aux=True)(p, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value, entering

    graph = assert_same(step, arguments(), 2)
    returned = {o.operand for o in graph.outputs}
    assert any(v.type.shape == (LAYERS, 4, WIDTH) for op in graph.operators for v in op.results if v.name in returned)


@pytest.mark.parametrize(
    ("layers", "wanted"), [(4, ()), (12, (3, 4)), (16, (4, 2)), (64, (8, 4)), (80, (8, 10)), (7, ())]
)
def test_lengths_are_near_the_root_of_the_layers(x64: None, layers: int, wanted: tuple[int, ...]) -> None:
    step, args = model(optax.sgd(1e-2), layers=layers, remat=True)
    lengths = segment_lengths(traced(step, args)[0].graph)
    assert lengths == wanted
    assert not lengths or math.sqrt(layers) / 2 <= lengths[0] <= 2 * math.sqrt(layers)


@pytest.mark.slow
def test_single_layers_where_they_leave_much(x64: None) -> None:
    step, args = model(optax.sgd(1e-2), layers=4, widths=(64, 64), remat=False)
    assert segment_lengths(traced(step, args)[0].graph)[0] == 1


def test_what_has_no_such_loops_stays_as_it_is(x64: None) -> None:
    def flat(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda q: jnp.sum(jnp.tanh(x @ q)))(p)

    def forward(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(plain_layer, x, p)[0]

    def printing(p: Any, x: jax.Array) -> Any:
        def layer(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
            jax.debug.print("{}", y[0, 0])
            return plain_layer(y, p)

        return step_of(scanned(layer, remat=False))(p, x)

    stacked = arguments()
    for fn, args in ((flat, (jnp.ones((3, 2)), jnp.ones((4, 3)))), (forward, stacked), (printing, stacked)):
        step, _ = traced(fn, args)
        assert in_segments(step, 2) is step and segment_lengths(step.graph) == ()


def test_a_length_that_does_not_divide_the_layers_changes_nothing(x64: None) -> None:
    step, _ = traced(step_of(scanned(plain_layer, remat=True)), arguments())
    assert all(in_segments(step, k) is step for k in (0, 4, 5, LAYERS, 2 * LAYERS))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_loop_of_one_layer_takes_no_stacks(x64: None, layers: int) -> None:
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda y, _: (jnp.tanh(y @ q), None), x, None, length=6)[0])

        return p - jax.grad(loss)(p)

    assert_same(step, (jnp.linspace(-1.0, 1.0, 9).reshape(3, 3), jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)), layers)
