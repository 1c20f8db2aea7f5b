"""Stacks of layers taken apart into groups."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontend import BoundGraph
from autopar.ir import Graph
from autopar.lower.split_layers import group_count, split_layers
from examples import gpt
from tests.microbatch.running import numbers, run, traced

LAYERS = 6


def scanned_gpt():
    return gpt.build(
        layers=LAYERS, hidden=8, heads=2, vocab=16, seq=4, batch=3, scan=True, dropout=0.1, dtype="float64"
    )


def with_ramps():
    """An update that adds to the gradient what comes of a range over all layers, and of zeros."""

    def step(state, batch):
        def loss(params):
            x, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), batch, params)
            return jnp.mean(x**2)

        value, grad = jax.value_and_grad(loss)(state["params"])
        ramp = jnp.sin(lax.broadcasted_iota(grad.dtype, grad.shape, 0)) + jnp.square(jnp.zeros_like(grad))
        return {"params": state["params"] - 0.1 * (grad + ramp)}, value

    params = jax.random.normal(jax.random.key(0), (LAYERS, 4, 4))
    return step, ({"params": params}, jax.random.normal(jax.random.key(1), (3, 4)))


class Program(NamedTuple):
    """What `run` takes."""

    graph: Graph
    program: BoundGraph
    closed_over: tuple[jax.Array, ...]


@pytest.mark.parametrize("build", [pytest.param(scanned_gpt, marks=pytest.mark.slow), with_ramps])
@pytest.mark.parametrize("groups", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_nothing_has_the_size_of_all_layers(build, groups, x64):
    fn, args = build()
    plain, leaves = traced(fn, args)
    found = split_layers(plain, groups)
    graph = found.step.graph
    made = [v for op in graph.operators for v in op.results if v.type.rank > 1 and v.type.shape[0] == LAYERS]
    assert not made
    microbatch_inputs = []
    for leaf, at in zip([*leaves, *plain.closed_over], found.inputs, strict=True):
        microbatch_inputs += [leaf] if len(at) == 1 else np.split(leaf, len(at))
    got = run(Program(graph, found.step.program, ()), microbatch_inputs)
    wanted = [numbers(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]
    assert len(wanted) == len(found.outputs)
    for value, at in zip(wanted, found.outputs, strict=True):
        ours = [numbers(got[i]) for i in at]
        whole = ours[0] if len(at) == 1 else np.concatenate(ours)
        assert np.linalg.norm(whole - value) <= 1e-10 * max(np.linalg.norm(value), 1e-12)


def test_loops_over_groups_share_one_body():
    plain, _ = traced(*with_ramps())
    graph = split_layers(plain, 3).step.graph
    loops = [op for op in graph.operators if op.primitive == "scan"]
    assert len(loops) == 6
    assert len({id(op.region("body")) for op in loops}) == 2  # of the forward and of the backward pass


@pytest.mark.parametrize(
    ("layers", "stages", "groups"),
    [(80, 8, 16), (80, 16, 16), (60, 4, 12), (96, 32, 96), (105, 35, 105), (128, 64, 128), (48, 2, 8), (48, 1, 4)],
)
def test_groups_can_be_dealt_to_equal_stages(layers, stages, groups):
    assert group_count(layers, stages) == groups


def test_groups_divide_the_layers_where_stages_do_not():
    assert group_count(30, 4) == 15
    assert group_count(24, None) == 12
    assert group_count(7, 2) == 7
    assert group_count(11, 2) == 11
    assert group_count(4, 8) == 4
    assert group_count(0, 2) == 1
