"""The cut holds as few bytes as the best of all sets of values."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir import Graph, Input, Operator, TensorType, Value
from autopar.microbatch import analyze
from autopar.recompute import select
from autopar.recompute.select import Phases, cheapest_saved
from autopar.stages.layers import cluster
from examples import mlp
from tests.microbatch.running import traced
from tests.recompute.test_rewriting import EXAMPLES, bytes_of, phases_of


def typed(size):
    return TensorType((size,), "u8")


@st.composite
def problems(draw):
    """A graph, the values that are needed, the ids of operators that may run again, values that are held."""
    names = ["x"]
    operators = []
    for n in range(draw(st.integers(1, 7))):
        operands = tuple(draw(st.lists(st.sampled_from(names), max_size=3)))
        results = [f"v{n}.{k}" for k in range(draw(st.integers(1, 2)))]
        values = tuple(Value(r, typed(draw(st.integers(0, 9)))) for r in results)
        operators.append(Operator(f"o{n}", "add", operands, values))
        names += results
    graph = Graph("g", (Input("x", typed(1)),), tuple(operators))
    some = st.sets(st.sampled_from(names[1:]))
    repeated = draw(st.sets(st.sampled_from([op.id for op in operators])))
    return graph, draw(some), repeated, draw(some)


@st.composite
def chains(draw):
    """Problems in which most operators may run again, so that there is a choice between a value and what it is of."""
    names = ["x"]
    operators = []
    for n in range(draw(st.integers(2, 7))):
        operands = tuple(draw(st.lists(st.sampled_from(names[-3:]), min_size=1, max_size=2)))
        operators.append(Operator(f"o{n}", "add", operands, (Value(f"v{n}", typed(draw(st.integers(1, 9)))),)))
        names.append(f"v{n}")
    graph = Graph("g", (Input("x", typed(1)),), tuple(operators))
    fixed = {"o0", *draw(st.sets(st.sampled_from([op.id for op in operators]), max_size=2))}
    needed = {names[-1], *draw(st.sets(st.sampled_from(names[1:]), max_size=2))}
    return graph, needed, {op.id for op in operators} - fixed, set()


def suffices(graph, needed, repeated, saved):
    """Whether all of ``needed`` are held, or can be made of what is by operators that may run again."""
    there = {"x", *saved}
    for op in graph.operators:
        if op.id in repeated and there.issuperset(op.operands):
            there.update(v.name for v in op.results)
    return there.issuperset(needed)


@settings(max_examples=300, deadline=None)
@given(problems() | chains())
def test_the_cut_is_the_least_of_all_sets(problem):
    graph, needed, repeated, saved = problem
    found = cheapest_saved(graph, sorted(needed), graph.producers.get, lambda op: op.id in repeated, saved)
    assert suffices(graph, needed, repeated, found | saved)
    values = [v.name for op in graph.operators for v in op.results if v.name not in saved]
    least = min(
        bytes_of(graph, some)
        for size in range(len(values) + 1)
        for some in combinations(values, size)
        if suffices(graph, needed, repeated, saved.union(some))
    )
    assert bytes_of(graph, found) == least


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_selective_holds_no_more_than_none(name):
    build, overrides = EXAMPLES[name]
    graph = traced(*build(**overrides))[0].graph
    layers = cluster(graph, analyze(graph, 1), 3).members
    saved = {
        level: bytes_of(graph, select(graph, phases_of(graph), layers, level).saved) for level in ("none", "selective")
    }
    assert saved["selective"] <= saved["none"]


def test_what_runs_in_the_backward_pass_is_not_of_the_forward_pass():
    graph = traced(*mlp.build("tiny", abstract=True))[0].graph
    known = phases_of(graph)
    assert Phases.of(graph, known.forward | known.backward, frozenset()) == known
    late = frozenset(sorted(known.forward)[:1])  # known to depend on cotangents, whatever its name says
    assert Phases.of(graph, known.forward | known.backward, late) == Phases(known.forward - late, known.backward | late)
