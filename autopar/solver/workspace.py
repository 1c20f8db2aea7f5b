"""`Workspace`: a choice problem as a graph that presolve rewrites in place, with the record that undoes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import Array, ChoiceProblem, Edge, Node, Usage

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Removed:
    """How to choose for a node that presolve took out, once its neighbours' strategies are known.

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

    def strategy(self, chosen: Sequence[int]) -> int:
        """The first cheapest original strategy, given ``chosen`` original strategies by node."""
        total = self.costs
        for other, labels, costs in self.neighbours:
            total = total + costs[:, int(np.searchsorted(labels, chosen[other]))]
        return int(self.labels[int(total.argmin())])


@dataclass(eq=False)
class Workspace:
    """The graph during presolve; numbers of nodes are those of the original problem.

    Args:
        costs: costs of each node's remaining strategies.
        labels: original number of each remaining strategy, increasing.
        edges: ``edges[u][v]`` is the cost matrix between neighbours (u's strategies by v's); ``edges[v][u]`` is
            its transpose.
        usages: ``usages[v]`` is (row, bytes by strategy) for each memory row that v appears in.
        alive: whether the node is still there.
        offset: cost already certain.
        removed: nodes taken out, in order.
        infeasible: some node has no strategy left.
    """

    costs: list[Array]
    labels: list[Indices]
    edges: list[dict[int, Array]]
    usages: list[list[tuple[int, Array]]]
    alive: list[bool]
    offset: float = 0.0
    removed: list[Removed] = field(default_factory=list)
    infeasible: bool = False

    @staticmethod
    def of(problem: ChoiceProblem, times: Sequence[int]) -> Workspace:
        """The problem with parallel edges added up and one memory row for each of ``times`` (sorted)."""
        size = len(problem.nodes)
        edges: list[dict[int, Array]] = [{} for _ in range(size)]
        for edge in problem.edges:
            u, v = edge.source, edge.target
            known = edges[u].get(v)
            total = edge.costs if known is None else known + edge.costs
            edges[u][v], edges[v][u] = total, total.T
        held: list[dict[int, Array]] = [{} for _ in range(size)]
        moments = np.asarray(times, dtype=np.int64)
        for usage in problem.usages:
            first, last = np.searchsorted(moments, [usage.start, usage.stop])
            for row in range(int(first), int(last)):
                known = held[usage.node].get(row)
                held[usage.node][row] = usage.bytes if known is None else known + usage.bytes
        usages = [[(row, own[row]) for row in sorted(own) if own[row].any()] for own in held]
        costs = [node.costs for node in problem.nodes]
        return Workspace(costs, [np.arange(c.size) for c in costs], edges, usages, [True] * size)

    def drop(self, v: int, keep: NDArray[np.bool_]) -> None:
        """Leave node ``v`` only the strategies marked in ``keep``."""
        self.costs[v], self.labels[v] = self.costs[v][keep], self.labels[v][keep]
        self.usages[v] = [(row, used[keep]) for row, used in self.usages[v]]
        for other, costs in self.edges[v].items():
            left = costs[keep]
            self.edges[v][other], self.edges[other][v] = left, left.T
        if self.costs[v].size == 0:
            self.infeasible = True

    def disconnect(self, u: int, v: int) -> None:
        """Take the edge between ``u`` and ``v`` out."""
        del self.edges[u][v], self.edges[v][u]

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
        usages = tuple(Usage(at[v], row, row + 1, used) for v in kept for row, used in self.usages[v])
        return kept, ChoiceProblem(nodes, edges, usages, original.limit_bytes if usages else None)


def fold_constants(costs: Array) -> tuple[Array, Array] | None:
    """Row and column terms whose sums are the matrix ``costs``, or None where there are none (or inf is in it)."""
    if math.isinf(costs.max()):
        return None
    rows, columns = costs[:, 0], costs[0] - costs[0, 0]
    rest = costs - rows[:, None]
    rest -= columns
    np.abs(rest, out=rest)
    # Differences of a few roundings come from earlier sums; they are no real interaction.
    return None if rest.max() > 1e-15 * max(abs(costs.max()), abs(costs.min())) else (rows, columns)
