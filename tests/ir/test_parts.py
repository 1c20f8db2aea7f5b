"""Parts of a graph that share nothing: which operators belong together, and in which order they come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.independent import separate_parts
from tests.microbatch.running import traced


def adam_like(state, rate):
    factor = jnp.sqrt(rate) * 2  # of no part
    return {name: w - factor * (w * w + jnp.sin(w)) for name, w in state.items()}


def test_each_parameter_is_a_part_and_what_all_share_is_none():
    state = {"a": jnp.zeros((3, 4)), "b": jnp.zeros((3, 4)), "c": jnp.zeros(2)}
    graph = traced(adam_like, (state, jnp.float32(1)))[0].graph
    sources = [i.name for i in graph.inputs if "state" in i.name]
    parts = separate_parts(graph.operators, sources)
    assert [{o for op in part for o in op.reads if o in sources} for part in parts] == [{s} for s in sources]
    outside = {op.id for op in graph.operators} - {op.id for part in parts for op in part}
    assert {op.primitive for op in graph.operators if op.id in outside} >= {"sqrt"}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_parts_are_the_components_of_what_is_read_together(pairs):
    def step(arrays):
        return [arrays[i] * arrays[j] for i, j in pairs]

    with jax.enable_x64(False):
        graph = traced(step, ([jnp.zeros(3)] * 6,))[0].graph
    sources = [i.name for i in graph.inputs]
    groups = [{n} for n in range(6)]
    for i, j in pairs:
        joined = [g for g in groups if i in g or j in g]
        groups = [*(g for g in groups if g not in joined), set().union(*joined)]
    used = {n for pair in pairs for n in pair}
    wanted = {frozenset(sources[n] for n in g) for g in groups if g <= used and g}
    parts = separate_parts(graph.operators, sources)
    assert {frozenset(o for op in part for o in op.reads) for part in parts} == wanted
    order = {op.id: n for n, op in enumerate(graph.operators)}
    assert all([order[op.id] for op in part] == sorted(order[op.id] for op in part) for part in parts)
    assert sorted(order[part[0].id] for part in parts) == [order[part[0].id] for part in parts]
