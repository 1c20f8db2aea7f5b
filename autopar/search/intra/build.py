"""States the `ChoiceProblem` of a graph on a logical mesh.

Variables (nodes), each a choice of one strategy:
- an input: its layout, and where it lies (`.host`); if several operators read it, also a shared copy's (`.connect`);
- an operator: one of the strategies of its rule (`.walk`), unless each layout of one of its operands
  leaves it a single strategy: then it follows that operand and has no node of its own;
- a value with several readers: the layout of the copy that they share (`.connect`);
- what enters, is carried by and leaves a loop or a branch (`.regions`); a result.
Objective: the sum over nodes of seconds of work, and over edges of seconds of resharding from the layout in which a
value is computed to the one in which it is read, times the trips of enclosing loops.
An output that replaces an input ends in that input's layout (`.connect`). So an optimizer update is part
of the program, ZeRO-1/2/3 and FSDP are among its solutions. Bytes of live values are bounded at every time (`.memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.ir.primitives import wire_of
from autopar.ir.readers import read_by_products
from autopar.search.intra.builder import Builder, tables_of
from autopar.search.intra.connect import add_input, add_outputs, connect
from autopar.search.intra.fusion import has_backward
from autopar.search.intra.host import add_host_seconds, offloading
from autopar.search.intra.memory import usages
from autopar.search.intra.sharding_problem import Array, ShardingProblem
from autopar.search.intra.space import SpaceSplits
from autopar.search.intra.walk import GraphKernels, GraphWalk
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem, Edge, Node
from autopar.solver import Usage as SolverUsage
from autopar.solver.meter import Work


def build(problem: Problem, mesh: LogicalMesh, *, split_phases: bool = False) -> ShardingProblem:
    """States the sharding of a graph on a mesh as a `ChoiceProblem`.

    Args:
        problem: graph, costs, limits.
        mesh: the logical mesh.
        split_phases: whether forward and backward make their own copies of a value that is needed in
            another layout (less memory, more traffic) instead of one that lives through both. Programs of their own
            always do.
    """
    graph = problem.graph
    constraints = {c.value: c for c in problem.job.constraints}
    offered = offloading(problem)
    split = split_phases or problem.subproblem.separate_programs
    space = SpaceSplits.of(mesh, graph, constraints.values())
    b = Builder(tables_of(problem, mesh), split, offered, problem.job.donated, space)
    readers = Counter(o for op in graph.operators for o in set(op.reads))
    sliced = {o for op in graph.operators if op.primitive == "scan" for o in op.reads}
    replaced = {o.updates for o in graph.outputs}
    sent = {op.reads[0]: op.results[0].name for op in reversed(graph.operators) if wire_of(op) and op.reads}
    for i in graph.inputs:
        arriving = i.name in problem.subproblem.arriving
        name = sent.get(i.name, i.name)  # what is sent in a format of its own has the copy, the update none
        shared = not arriving and (readers[name] > 1 or name in sliced)
        copy_of = name if shared and name not in offered.update.inputs else None
        add_input(b, i, copy_of=copy_of, arriving=arriving, replaced=i.name in replaced, constraints=constraints)
    _walked(problem, b)
    b.time += 1
    if problem.cost_model.halves_products:
        unmarked = "update" if has_backward(graph) else "forward"
        for key in read_by_products(graph, phase=unmarked) & b.values.keys():
            value = b.values[key]
            value.halved = not value.wire and not any(k.partial for k in value.layouts)
    outputs = add_outputs(b, graph)
    for value in list(b.values.values()):
        connect(b, value)
    add_host_seconds(problem.cost_model, b.nodes, b.values, mesh.sizes)
    usage = [*usages(problem, b.values, b.copies, b.layouts, b.time + 1), *b.workspaces]
    costly = _costly(b.edges)
    choice = ChoiceProblem(
        nodes=tuple(Node(n.name, n.costs) for n in b.nodes),
        edges=tuple(Edge(s, t, b.edges[s, t]) for s, t in sorted(b.edges) if costly[_base(b.edges[s, t])]),
        usages=tuple(SolverUsage(u.node, u.start, u.stop, u.bytes) for u in usage),
        limit_bytes=float(problem.memory_limit_bytes),
        meter=problem.meter,
    )
    problem.meter.add(Work.PARTS, choice.parts)
    problem.meter.add(Work.CELLS, choice.columns)
    return ShardingProblem(
        choice,
        mesh,
        tuple(b.nodes),
        b.values,
        tuple(b.sites),
        tuple(b.region_sites),
        tuple(b.copies),
        tuple(usage),
        tuple(outputs),
        tuple(b.notes),
        memory_bound=split_phases,  # a copy of one phase is given back before the next
        broken=tuple(b.broken),
    )


def _walked(problem: Problem, b: Builder) -> None:
    """Adds all operators of a graph. The first walk of a graph finds its kernels for those on other meshes."""
    graph, store = problem.graph, problem.store
    key = store.key("kernels", graph, problem.cost_model, frozenset(b.offered.update.operators))
    known: GraphKernels | None = store.get(key, None)
    walk = GraphWalk(b, has_backward(graph), known)
    walk.graph(graph, "", 1.0)
    if known is None:
        store.once(key, lambda: GraphKernels(tuple(walk.found)))


def _costly(edges: Mapping[tuple[int, int], Array]) -> Mapping[int, bool]:
    """Whether any edge of a matrix costs something, by `_base`: many edges share one, or its transpose."""
    return {base: bool(costs.any()) for base, costs in {_base(costs): costs for costs in edges.values()}.items()}


def _base(costs: Array) -> int:
    """Identity of the array that a matrix is all of."""
    base = costs.base
    return id(base) if isinstance(base, np.ndarray) and base.size == costs.size else id(costs)
