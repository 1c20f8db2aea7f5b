"""`Packed`: a contracted problem as flat arrays, which is what compiled loops take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.solver.evaluate import maximal_times
from autopar.solver.lagrange.contract import Contracted
from autopar.solver.lagrange.pool import Pool
from autopar.solver.meter import Meter, Work
from autopar.solver.problem import Array, ChoiceProblem

Ints = NDArray[np.int64]

_SMALL = 2000  # strategies in all


class PackedGraph(NamedTuple):
    """Nodes in order, each with its half-edges in the order of its neighbours.

    Args:
        first: where each node's strategies start in vectors over all strategies; one more at the end.
        edges: where each node's half-edges start; one more at the end.
        other: the neighbour, by half-edge.
        sends: where the message to the neighbour starts.
        gets: where the message from it starts.
        own_rows: where the table starts in ``tables`` with own strategies as rows.
        own_columns: where it starts with own strategies as columns.
        tables: entries of all different tables, and of their transposes.
        share: part of a node's cost that each message takes (TRW-S).
        widest: most strategies of a node.
    """

    first: Ints
    edges: Ints
    other: Ints
    sends: Ints
    gets: Ints
    own_rows: Ints
    own_columns: Ints
    tables: Array
    share: Array
    widest: int


class PackedMemory(NamedTuple):
    """Usages of choices beyond those of every choice, in rows of time.

    Args:
        runs: where each node's runs of rows start; one more at the end.
        node: of each run.
        start: its first row.
        stop: the row after its last.
        first: where its bytes by strategy start; one more at the end.
        bytes: by run and strategy.
        base: bytes that every choice holds, by row.
        limit: bytes that none may exceed in any row.
    """

    runs: Ints
    node: Ints
    start: Ints
    stop: Ints
    first: Ints
    bytes: Array
    base: Array
    limit: float


@dataclass(frozen=True, eq=False)
class Packed:
    """A problem of the nodes that have a choice.

    Args:
        graph: nodes and edges; its tables hold ``forbidden`` where the problem has inf.
        costs: of all strategies.
        memory: rows of time.
        constant: cost of the nodes that have no choice.
        forbidden: stands for inf: more than any allowed choice costs.
        nodes: original number of each node.
        meter: counts what solving it takes.
    """

    graph: PackedGraph
    costs: Array
    memory: PackedMemory
    constant: float
    forbidden: float
    nodes: tuple[int, ...]
    meter: Meter

    @cached_property
    def entries(self) -> int:
        """Entries of the tables of all edges, once each: what a sweep in one direction visits."""
        graph = self.graph
        sizes = np.diff(graph.first)
        by_edge = np.repeat(sizes, np.diff(graph.edges))
        return int((by_edge * sizes[graph.other]).sum()) // 2 if graph.other.size else 0

    @property
    def small(self) -> bool:
        """Whether an answer takes milliseconds, so that it is found whatever the time limit."""
        return self.costs.size <= _SMALL


def pack(problem: ChoiceProblem, contracted: Contracted) -> Packed:
    """``contracted`` as arrays, with the memory of all nodes of ``problem``."""
    nodes = tuple(v for v in sorted(contracted.costs) if contracted.costs[v].size > 1)
    costs = [contracted.costs[v] for v in nodes]
    sizes = np.array([node_costs.size for node_costs in costs], dtype=np.int64)
    constant = float(sum(node_costs[0] for node_costs in contracted.costs.values() if node_costs.size == 1))
    graph, forbidden = _graph(nodes, sizes, costs, contracted)
    memory = _memory(problem, nodes, sizes, contracted)
    problem.meter.add(Work.REDUCED, problem.parts)
    every = np.concatenate([*costs, np.zeros(0)])
    return Packed(graph, every, memory, constant, forbidden, nodes, problem.meter)


def starts(sizes: Ints) -> Ints:
    """Starts of parts of these sizes when laid one after the other, and the end of the last."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def _graph(
    nodes: tuple[int, ...], sizes: Ints, costs: list[Array], contracted: Contracted
) -> tuple[PackedGraph, float]:
    pool = Pool()
    position = {v: i for i, v in enumerate(nodes)}
    ends = sorted((position[u], position[v], pool.table(table)) for (u, v), table in contracted.edges.items())
    # No allowed choice costs this much, and sums of it lose no digit that matters.
    most = sum(float(np.abs(node_halves).max()) for node_halves in costs)
    largest = [float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in pool.tables]
    forbidden = 2.0 * (most + sum(largest[table] for *_, table in ends)) + 1.0
    laid = [np.where(np.isfinite(table), table, forbidden) for table in pool.tables]
    begin = starts(np.array([2 * table.size for table in laid], dtype=np.int64))
    around: list[list[tuple[int, int, int, int, int]]] = [[] for _ in nodes]
    at = 0
    for u, v, table in ends:
        rows, columns = int(begin[table]), int(begin[table]) + laid[table].size
        to_v, to_u = at, at + int(sizes[v])
        at = to_u + int(sizes[u])
        around[u].append((v, to_v, to_u, rows, columns))
        around[v].append((u, to_u, to_v, columns, rows))
    halves = np.array([half for node_halves in around for half in sorted(node_halves)], dtype=np.int64).reshape(-1, 5)
    other, sends, gets, own_rows, own_columns = (np.ascontiguousarray(column) for column in halves.T)
    later = [sum(half[0] > v for half in node_halves) for v, node_halves in enumerate(around)]
    share = [1.0 / max(after, len(node_halves) - after, 1) for node_halves, after in zip(around, later, strict=True)]
    graph = PackedGraph(
        starts(sizes),
        starts(np.array([len(node_halves) for node_halves in around], dtype=np.int64)),
        other,
        sends,
        gets,
        own_rows,
        own_columns,
        np.concatenate([part.ravel() for table in laid for part in (table, table.T)] + [np.zeros(0)]),
        np.array(share, dtype=np.float64),
        int(sizes.max(initial=1)),
    )
    return graph, forbidden


def _memory(problem: ChoiceProblem, nodes: tuple[int, ...], sizes: Ints, contracted: Contracted) -> PackedMemory:
    limit = np.inf if problem.limit_bytes is None else problem.limit_bytes
    times = np.array(maximal_times(problem.usages) if np.isfinite(limit) else (), dtype=np.int64)
    position = {v: i for i, v in enumerate(nodes)}
    change = np.zeros(times.size + 1)
    held: dict[tuple[int, int, int], Array] = {}
    for use in problem.usages:
        start, stop = (int(row) for row in np.searchsorted(times, (use.start, use.stop)))
        if start == stop:
            continue
        values = use.bytes[contracted.strategies[use.node]]
        least = float(values.min())
        change[start] += least
        change[stop] -= least
        values = values - least
        if values.any():
            key = (position[contracted.leader[use.node]], start, stop)
            held[key] = held[key] + values if key in held else values
    rows = _merge_rows(np.cumsum(change)[:-1], sorted(held))
    merged: dict[tuple[int, int, int], Array] = {}
    for (v, start, stop), values in sorted(held.items()):
        key = (v, int(rows.number[start]), int(rows.number[stop]))
        merged[key] = merged[key] + values if key in merged else values
    runs = np.array(sorted(merged), dtype=np.int64).reshape(-1, 3)
    node, start_rows, stop_rows = (np.ascontiguousarray(column) for column in runs.T)
    return PackedMemory(
        np.searchsorted(runs[:, 0], np.arange(sizes.size + 1)).astype(np.int64),
        node,
        start_rows,
        stop_rows,
        starts(sizes[runs[:, 0]]),
        np.concatenate([*(merged[key] for key in sorted(merged)), np.zeros(0)]),
        rows.base,
        float(limit),
    )


@dataclass(frozen=True, eq=False)
class _TimeRows:
    number: Ints  # new number of each row, and of the one after the last
    base: Array


def _merge_rows(base: Array, runs: list[tuple[int, int, int]]) -> _TimeRows:
    """Rows between which no run starts or stops made one, with the most that any of them holds for certain."""
    changes = np.zeros(base.size + 1, dtype=np.bool_)
    changes[[row for _, start, stop in runs for row in (start, stop)]] = True
    if base.size:
        changes[0] = True
    changes[-1] = True
    number = np.cumsum(changes) - 1
    if not base.size:
        return _TimeRows(np.zeros(1, dtype=np.int64), base)
    return _TimeRows(number, np.maximum.reduceat(base, np.flatnonzero(changes[:-1])))


def lifted(contracted: Contracted, packed: Packed, choice: Ints) -> tuple[int, ...]:
    """The choice for the original problem that a packed ``choice`` means."""
    by_node = dict(zip(packed.nodes, choice.tolist(), strict=True))
    return tuple(
        int(strategies[by_node.get(leader, 0)])
        for leader, strategies in zip(contracted.leader, contracted.strategies, strict=True)
    )


def projected(contracted: Contracted, packed: Packed, choice: Sequence[int]) -> Ints | None:
    """The packed choice that lifts to ``choice`` of the original problem; None where there is none."""
    if len(choice) != len(contracted.leader):
        return None
    numbers = []
    for v in packed.nodes:
        same = np.flatnonzero(contracted.strategies[v] == choice[v])
        if not same.size:
            return None
        numbers.append(int(same[0]))
    inner = np.array(numbers, dtype=np.int64)
    return inner if lifted(contracted, packed, inner) == tuple(choice) else None
