"""`Workspace`: a choice problem as a graph that presolve rewrites in place, with the record that undoes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import Array, ChoiceProblem, Edge, Node, Usage

Indices = NDArray[np.int64]

#: Part of the largest cost below which a difference is rounding.
NOISE = 1e-15


@dataclass(frozen=True, eq=False)
class Removed:
    """Choice for a node that presolve took out, once its neighbours' strategies are known.

    Args:
        node: the node, as numbered in the original problem.
        labels: original strategies that it still had.
        costs: their costs.
        neighbours: for each neighbour its number, the original strategies that it had and the edge
            (own strategies by the neighbour's).
    """

    node: int
    labels: Indices
    costs: Array
    neighbours: tuple[tuple[int, Indices, Array], ...]

    def strategy(self, choice: Sequence[int]) -> int:
        """The node's cheapest original strategy, the first of equal ones, given the strategies of its neighbours.

        Args:
            choice: by node of the original problem its original strategy; those of the neighbours are read.
        """
        total = self.costs
        for other, labels, costs in self.neighbours:
            total = total + costs[:, int(np.searchsorted(labels, choice[other]))]
        return int(self.labels[int(total.argmin())])


@dataclass(eq=False)
class Workspace:
    """The graph during presolve; numbers of nodes are those of the original problem.

    Args:
        costs: costs of each node's remaining strategies.
        labels: original number of each remaining strategy, increasing.
        edges: ``edges[u][v]`` is the cost matrix between neighbours (u's strategies by v's); ``edges[v][u]`` is
            its transpose.
        usages: ``usages[v]`` is (first row, row after the last, bytes by strategy) for each run of equal memory rows
            that v appears in, in order.
        alive: whether the node is still there.
        offset: cost already certain.
        removed: nodes taken out, in order.
        infeasible: some node has no strategy left.
        fresh: by node the neighbours to which the matrix is new since folding last looked.
        doubt: by node the neighbours to which the matrix may have inf.
        unsure: nodes whose own costs may have inf.
        compiled: the module `autopar.solver.compiled`; None where that is not worth loading.
    """

    costs: list[Array]
    labels: list[Indices]
    edges: list[dict[int, Array]]
    usages: list[list[tuple[int, int, Array]]]
    alive: list[bool]
    offset: float = 0.0
    removed: list[Removed] = field(default_factory=list)
    infeasible: bool = False
    fresh: list[set[int]] = field(default_factory=list)
    doubt: list[set[int]] = field(default_factory=list)
    unsure: set[int] = field(default_factory=set)
    compiled: ModuleType | None = None

    @staticmethod
    def of(problem: ChoiceProblem, times: Sequence[int]) -> Workspace:
        """The problem with parallel edges added up and one memory row for each of ``times`` (sorted)."""
        size = len(problem.nodes)
        edges: list[dict[int, Array]] = [{} for _ in range(size)]
        doubt: list[set[int]] = [set() for _ in range(size)]
        for edge in problem.edges:
            u, v = edge.source, edge.target
            known = edges[u].get(v)
            total = edge.costs if known is None else known + edge.costs
            edges[u][v], edges[v][u] = total, total.T
            if not edge.finite:
                doubt[u].add(v)
                doubt[v].add(u)
        held: list[list[tuple[int, int, Array]]] = [[] for _ in range(size)]
        moments = np.asarray(times, dtype=np.int64)
        ends = np.array([(usage.start, usage.stop) for usage in problem.usages], dtype=np.int64).reshape(-1, 2)
        spans = np.searchsorted(moments, ends).tolist() if moments.size else ()
        for usage, (first, last) in zip(problem.usages, spans, strict=bool(moments.size)):
            if first < last and usage.bytes.any():
                held[usage.node].append((first, last, usage.bytes))
        usages = [_runs(column) for column in held]
        costs = [node.costs for node in problem.nodes]
        space = Workspace(costs, [np.arange(c.size) for c in costs], edges, usages, [True] * size)
        space.fresh = [set(around) for around in edges]
        space.doubt = doubt
        space.unsure = {v for v, column in enumerate(costs) if column.size and not math.isfinite(column.max())}
        return space

    def drop(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Leave node ``v`` only the strategies marked in ``keep``."""
        self.costs[v], self.labels[v] = self.costs[v][keep], self.labels[v][keep]
        self.usages[v] = [(first, last, used[keep]) for first, last, used in self.usages[v]]
        for other, costs in self.edges[v].items():
            left = costs[keep]
            self.edges[v][other], self.edges[other][v] = left, left.T
            self.fresh[v].add(other)
            self.fresh[other].add(v)
        if self.costs[v].size == 0:
            self.infeasible = True

    def connect(self, u: int, v: int, costs: Array) -> None:
        """Give ``u`` and ``v`` an edge, in place of the one they may have."""
        self.edges[u][v], self.edges[v][u] = costs, costs.T
        self.fresh[u].add(v)
        self.fresh[v].add(u)
        if not math.isfinite(costs.max()):
            self.doubt[u].add(v)
            self.doubt[v].add(u)

    def disconnect(self, u: int, v: int) -> None:
        """Take the edge between ``u`` and ``v`` out."""
        del self.edges[u][v], self.edges[v][u]
        for one, other in ((u, v), (v, u)):
            self.fresh[one].discard(other)
            self.doubt[one].discard(other)

    def take_out(self, v: int) -> None:
        """Take ``v`` out with its edges; its strategy will be the cheapest given its neighbours'."""
        around = tuple((u, self.labels[u], costs) for u, costs in self.edges[v].items())
        self.removed.append(Removed(v, self.labels[v], self.costs[v], around))
        for u in list(self.edges[v]):
            self.disconnect(u, v)
        self.alive[v] = False

    def problem(self, original: ChoiceProblem) -> tuple[tuple[int, ...], ChoiceProblem]:
        """The nodes left, by original number, and the problem between them; memory row i lives at time i."""
        kept = tuple(v for v, alive in enumerate(self.alive) if alive)
        at = {v: i for i, v in enumerate(kept)}
        nodes = tuple(Node(original.nodes[v].name, self.costs[v]) for v in kept)
        edges = tuple(Edge(at[u], at[v], self.edges[u][v]) for u in kept for v in sorted(self.edges[u]) if u < v)
        usages = tuple(Usage(at[v], first, last, used) for v in kept for first, last, used in self.usages[v])
        limit_bytes = original.limit_bytes if usages else None
        return kept, ChoiceProblem(nodes, edges, usages, limit_bytes, original.meter)


def _runs(held: list[tuple[int, int, Array]]) -> list[tuple[int, int, Array]]:
    """One node's usages without overlap: cut at all starts and stops and added up."""
    if len(held) < 2:
        return held
    cuts = sorted({cut for first, last, _ in held for cut in (first, last)})
    runs = []
    for first, last in itertools.pairwise(cuts):
        parts = [used for start, stop, used in held if start <= first and last <= stop]
        if parts:
            runs.append((first, last, np.asarray(sum(parts[1:], parts[0]))))
    return runs


def fold_constants(costs: Array) -> tuple[Array, Array] | None:
    """Row and column terms whose sums are the matrix ``costs``, or None where there are none (or inf is in it)."""
    most = max(float(costs.max()), -float(costs.min()))
    if math.isinf(most):
        return None
    # One corner rejects most matrices; differences of a few roundings come from earlier sums and are no interaction.
    corner = costs[0, 0] + costs[-1, -1] - costs[0, -1] - costs[-1, 0] if min(costs.shape) > 1 else 0.0
    if abs(corner) > 4 * NOISE * most:
        return None
    rows, columns = costs[:, 0], costs[0] - costs[0, 0]
    rest = costs - rows[:, None]
    rest -= columns
    np.abs(rest, out=rest)
    return None if rest.max() > NOISE * most else (rows, columns)
