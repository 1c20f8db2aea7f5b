"""Values that one kernel alone computes: those with an operator on every way from them to memory."""

import jax
import jax.numpy as jnp
import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.primitives import is_fusible
from autopar.ir.readers import converging
from tests.search.problems import f32, graph_of

_OPERATORS = (
    lambda a, b: jnp.tanh(a),
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, b: a @ b,
    lambda a, b: jnp.cumsum(a, 0),
)


def _program(steps, returned):
    def fn(x, y):
        values = [x, y]
        for kind, a, b in steps:
            values.append(_OPERATORS[kind](values[a % len(values)], values[b % len(values)]))
        return [values[-1 - i % len(values)] for i in returned]

    return graph_of(fn, f32(4, 4), f32(4, 4))


def _by_paths(graph):
    """Values of which all paths to what lies in memory share an operator."""
    flow, returned = networkx.DiGraph(), {o.operand for o in graph.outputs}
    makers = {v.name: op for op in graph.operators for v in op.results}
    for op in graph.operators:
        flow.add_node(op.id)
        if is_fusible(op):
            flow.add_edges_from((op.id, r.id) for r in graph.operators for v in op.results if v.name in r.reads)
        if any(v.name in returned for v in op.results):
            flow.add_edge(op.id, "out " + op.id)
    sinks = [n for n in flow if not flow.out_degree(n)]
    names = set()
    for name, op in makers.items():
        if not is_fusible(op) or name in returned:
            continue
        paths = [set(p[1:]) for sink in sinks for p in networkx.all_simple_paths(flow, op.id, sink)]
        shared = set.intersection(*paths) if paths else set()
        if any(not n.startswith("out ") for n in shared):
            names.add(name)
    return names


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
)
def test_as_paths_say(steps, returned):
    graph = _program(steps, returned)
    assert converging(graph) == _by_paths(graph)


def test_the_derivative_of_gelu_is_one_kernel():
    graph = graph_of(jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) * 3.0)), f32(64, 64))
    large = {v.name for op in graph.operators for v in op.results if v.type.size == 64 * 64}
    (result,) = (o.operand for o in graph.outputs)
    assert large - converging(graph) == {result}
