"""Closures, reachability and loops: what they find in small graphs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost import total_flops
from autopar.frontend.build import build_graph
from autopar.ir import Graph, Layout, parse_graph
from autopar.ir.analysis import closure, dependents, live, names_made, names_read, places
from autopar.ir.loops import ASSUMED_ITERATIONS, Scan, While, runs_inside

TEXT = """
graph "g"(
  %x: f32[4] batch,
  %w: f32[4] parameter,
) {
  %a: f32[4] = sin(%x)
  %b: f32[4] = add(%a, %w)
  %c: f32[4] = cos(%w)
  %d: f32[4] = mul(%c, 2.0: f32[])
  %e: f32[4] = exp(%d)
  return (
    %b: f32[4] at "b",
    %d: f32[4] at "d",
  )
}
"""


@pytest.fixture
def graph() -> Graph:
    return parse_graph(TEXT)


def ids(operators):
    return [op.id for op in operators]


def test_closure(graph: Graph) -> None:
    assert ids(closure(graph.operators, ["b"])) == ["a", "b"]
    assert ids(closure(graph.operators, ["x"])) == []
    assert ids(closure(graph.operators, ["e", "b"], given=["d", "a"])) == ["b", "e"]
    assert ids(closure(graph.operators, ["e"], given=["e"])) == []
    assert ids(closure(graph.operators, ["e"], within=lambda op: op.id != "d")) == ["e"]


def test_live_operators_are_those_of_outputs(graph: Graph) -> None:
    assert ids(live(graph.operators, (o.operand for o in graph.outputs))) == ["a", "b", "c", "d"]


def test_dependents(graph: Graph) -> None:
    assert ids(dependents(graph.operators, ["x"])) == ["a", "b"]
    assert ids(dependents(graph.operators, ["w"])) == ["b", "c", "d", "e"]
    assert ids(dependents(graph.operators, [], also=lambda op: op.id == "d")) == ["d", "e"]


def test_names(graph: Graph) -> None:
    assert names_read(graph.operators) == {"x", "a", "w", "c", "d"}
    assert names_made(graph.operators[:2]) == ["a", "b"]
    assert graph.by_id["d"].reads == ("c",)


def test_places_follow_readers(graph: Graph) -> None:
    read_at = {"b": {0}, "d": {1, 2}}
    found = places(graph.operators, read_at, lambda op, wanted: wanted or {3})
    assert found == {"e": (3,), "d": (1, 2, 3), "c": (1, 2, 3), "b": (0,), "a": (0,)}
    assert read_at["w"] == {0, 1, 2, 3}


def test_a_scan_splits_what_it_takes() -> None:
    def f(c, x, stack):
        return jax.lax.scan(lambda carry, row: (carry @ c + row, carry.sum()), x, stack)

    closed = jax.make_jaxpr(f)(jnp.zeros((4, 4)), jnp.zeros((4, 4)), jnp.zeros((6, 4, 4)))
    graph = build_graph(closed, "f").graph
    op = next(op for op in graph.operators if op.primitive == "scan")
    scan = Scan.of(op)
    assert (scan.length, scan.num_consts, scan.num_carry, scan.num_whole) == (6, 1, 1, 2)
    consts, carries, stacks = scan.split(graph.operand_types(op))
    assert [str(t) for t in (*consts, *carries, *stacks)] == ["f32[4,4]", "f32[4,4]", "f32[6,4,4]"]
    carried, rows = scan.split_results([v.type for v in op.results])
    assert [str(t) for t in (*carried, *rows)] == ["f32[4,4]", "f32[6]"]
    assert runs_inside(op, 2.0) == 12.0
    assert total_flops(graph, op) == 6 * (2 * 4**3 + 16 + 16)


def test_a_while_loop_splits_what_it_takes() -> None:
    def f(limit, step, x):
        return jax.lax.while_loop(lambda c: c.sum() < limit, lambda c: c + step, x)

    graph = build_graph(jax.make_jaxpr(f)(1.0, jnp.ones(4), jnp.zeros(4)), "f").graph
    (op,) = graph.operators
    loop = While.of(op)
    assert (loop.cond_consts, loop.body_consts) == (1, 1)
    assert [[str(t) for t in part] for part in loop.split(graph.operand_types(op))] == [
        ["f32[]"],
        ["f32[4]"],
        ["f32[4]"],
    ]
    assert total_flops(graph, op) == ASSUMED_ITERATIONS * (4 + (4 + 1))


def test_branches_are_equally_likely() -> None:
    def f(i, x):
        return jax.lax.switch(i, [lambda x: x + 1, lambda x: x @ x], x)

    graph = build_graph(jax.make_jaxpr(f)(0, jnp.zeros((4, 4))), "f").graph
    op = next(op for op in graph.operators if op.primitive == "cond")
    assert total_flops(graph, op) == (16 + 2 * 4**3) / 2


def test_layouts_of_slices_and_stacks() -> None:
    layout = Layout.parse("[.,x,y]+sum(z)")
    assert str(layout.slice()) == "[x,y]+sum(z)"
    assert layout.slice().stack() == layout
