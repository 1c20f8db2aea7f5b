"""The integer program of a choice problem, as plain arrays.

Variables
    s[v,k] in {0,1}     node v takes strategy k
    e[u,v,A,B] >= 0     u takes a strategy of class A and v one of class B, for each edge; a class is a set of
                        strategies with equal rows (columns) in the edge's matrix R
    z >= 0              the peak, only where memory is minimized

Objective (costs are shifted by constants, kept in ``offset``, so that none is negative, then scaled)
    minimize  sum_{v,k} c[v,k] s[v,k] + sum_{u,v,A,B} R[u,v,A,B] e[u,v,A,B]           `_add_nodes`, `_add_edge`
    or        z                                                                        `least_peak_program`

Constraints
    sum_k s[v,k] = 1                                        for each node              `_add_nodes`
    sum_B e[u,v,A,B] = sum_{k in A} s[u,k]                  for each edge and class A  `_add_edge`
    sum_A e[u,v,A,B] = sum_{k in B} s[v,k]                  for each edge and class B  `_add_edge`
    sum_{v live at t} usage[v,t,k] s[v,k] <= limit          for each time t            `_add_memory`
    s[v,k] = 0                                              where k alone breaks a row `_add_memory`
    sum_{(v,k) in Q} s[v,k] <= |Q| - 1                      for a set Q that was seen  `with_cover`
                                                            to break a row
    sum_{v live at t} usage[v,t,k] s[v,k] <= z              for each time t            `least_peak_program`

Forbidden pairs (R = inf) have no e. Where R is a row term plus a column term, it is part of c and has no e.
This is the edge form: with s integral e is integral too, and its relaxation is the local polytope, much tighter than
e >= s + s' - 1 of Alpa (OSDI'22, eq. 2-5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.solver.evaluate import FIT_TOLERANCE, maximal_times
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.workspace import Indices, Workspace, fold_constants

#: What the largest cost is scaled to: HiGHS compares objectives up to an absolute 1e-6 or so.
SCALED_COST = 1e4


@dataclass(frozen=True, eq=False)
class Row:
    """``lower <= sum(values * x[columns]) <= upper``."""

    columns: Indices
    values: Array
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class EdgeColumns:
    """Columns of an edge's variables.

    Args:
        source, target: the nodes.
        source_class, target_class: class of each strategy.
        columns: column of e by classes; -1 where the pair is forbidden.
    """

    source: int
    target: int
    source_class: Indices
    target_class: Indices
    columns: Indices


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """minimize costs @ x subject to rows and ``0 <= x <= upper``.

    Args:
        costs: scaled cost by column.
        upper: largest value by column.
        binaries: the first so many columns are binary, the rest continuous.
        rows: the constraints.
        first: first column of each node's strategies; one more entry for the end.
        edges: where the edge variables are.
        offset: unscaled constant: cost of a choice = offset + (costs @ x) / scale.
        scale: factor from the problem's unit to the program's.
        feasible: False where building it showed that nothing fits.
    """

    costs: Array
    upper: Array
    binaries: int
    rows: tuple[Row, ...]
    first: Indices
    edges: tuple[EdgeColumns, ...]
    offset: float
    scale: float
    feasible: bool = True

    def choice(self, values: Array) -> tuple[int, ...]:
        """The strategy of largest value, for each node, in ``values`` by column."""
        ends = zip(self.first[:-1], self.first[1:], strict=True)
        return tuple(int(np.argmax(values[a:b])) for a, b in ends)

    def values(self, choice: Sequence[int]) -> Array | None:
        """Values of the program's variables (0 or 1) under ``choice``; None where it takes a forbidden pair.

        The last variable, the largest memory, is 0.
        """
        values: Array = np.zeros(self.costs.size)
        values[self.first[:-1] + np.asarray(choice, dtype=np.int64)] = 1.0
        for edge in self.edges:
            a, b = edge.source_class[choice[edge.source]], edge.target_class[choice[edge.target]]
            if edge.columns[a, b] < 0:
                return None
            values[edge.columns[a, b]] = 1.0
        return values

    def with_cover(self, cover: Sequence[tuple[int, int]]) -> IntegerProgram:
        """The program with a row that forbids taking all (node, strategy) pairs of ``cover`` together."""
        columns = np.array([self.first[v] + k for v, k in cover], dtype=np.int64)
        row = Row(columns, np.ones(columns.size), -math.inf, columns.size - 1.0)
        return replace(self, rows=(*self.rows, row))


@dataclass(eq=False)
class _ProgramBuilder:
    costs: list[Array] = field(default_factory=list)
    upper: list[Array] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    edges: list[EdgeColumns] = field(default_factory=list)
    first: Indices = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    columns: int = 0
    offset: float = 0.0
    feasible: bool = True

    def add(self, costs: Array) -> Indices:
        """New columns of those costs (inf: fixed at 0); returns their numbers."""
        forbidden = np.isinf(costs)
        self.costs.append(np.where(forbidden, 0.0, costs))
        self.upper.append(np.where(forbidden, 0.0, 1.0))
        numbers = np.arange(self.columns, self.columns + costs.size)
        self.columns += costs.size
        return numbers

    def program(self, binaries: int) -> IntegerProgram:
        """The integer program, scaled."""
        costs = np.concatenate(self.costs) if self.costs else np.zeros(0)
        scale = SCALED_COST / costs.max(initial=0.0) if costs.max(initial=0.0) > 0 else 1.0
        upper = np.concatenate(self.upper) if self.upper else np.zeros(0)
        return IntegerProgram(
            costs * scale, upper, binaries, tuple(self.rows), self.first, tuple(self.edges), self.offset, scale,
            self.feasible,
        )  # fmt: skip


def build_program(problem: ChoiceProblem) -> IntegerProgram:
    """The program that minimizes cost under the memory limit."""
    builder, binaries, space = _start(problem)
    if problem.limit_bytes is not None and problem.limit_bytes < math.inf:
        _add_memory(builder, space, problem.limit_bytes)
    return builder.program(binaries)


def least_peak_program(problem: ChoiceProblem) -> IntegerProgram:
    """The program that minimizes the peak, whatever the cost, over pairs that are not forbidden.

    z is the last column and counts in units of 1 / ``scale`` bytes.
    """
    nodes = tuple(replace(n, costs=np.where(np.isinf(n.costs), math.inf, 0.0)) for n in problem.nodes)
    edges = tuple(replace(e, costs=np.where(np.isinf(e.costs), math.inf, 0.0)) for e in problem.edges)
    builder, binaries, space = _start(replace(problem, nodes=nodes, edges=edges))
    rows = _usage_rows(builder, space)
    unit = max((float(values.max()) for _, values in rows), default=1.0) or 1.0
    z = builder.add(np.ones(1))
    builder.upper[-1][:] = math.inf
    for columns, values in rows:
        row = Row(np.append(columns, z), np.append(values / unit, -1.0), -math.inf, 0.0)
        builder.rows.append(row)
    program = builder.program(binaries)
    return replace(program, costs=program.costs / program.scale, scale=1.0 / unit)


def _start(problem: ChoiceProblem) -> tuple[_ProgramBuilder, int, Workspace]:
    """Nodes and edges; the number of binaries and the merged problem, whose row i is the i-th maximal time."""
    times = maximal_times(problem.usages)
    space = Workspace.of(problem, times)
    residues = [(u, v, _residue(space, u, v)) for u in range(len(space.costs)) for v in sorted(space.edges[u]) if u < v]
    builder = _ProgramBuilder()
    _add_nodes(builder, space)
    binaries = builder.columns
    for u, v, rest in residues:
        if rest is not None:
            _add_edge(builder, u, v, rest)
    return builder, binaries, space


def _residue(space: Workspace, u: int, v: int) -> Array | None:
    """The rest of an edge after moving costs into its nodes, none negative; None if nothing is left."""
    rest = space.edges[u][v]
    terms = fold_constants(rest)
    if terms is not None:
        space.costs[u], space.costs[v] = space.costs[u] + terms[0], space.costs[v] + terms[1]
        return None
    rows = rest.min(axis=1)
    rows = np.where(np.isinf(rows), 0.0, rows)
    rest = rest - rows[:, None]
    columns = rest.min(axis=0)
    columns = np.where(np.isinf(columns), 0.0, columns)
    space.costs[u], space.costs[v] = space.costs[u] + rows, space.costs[v] + columns
    return rest - columns


def _add_nodes(builder: _ProgramBuilder, space: Workspace) -> None:
    """s[v,k], their costs above the node's least, and sum_k s[v,k] = 1."""
    for costs in space.costs:
        least = float(costs.min())
        if math.isinf(least):
            builder.feasible, least = False, 0.0
        builder.offset += least
        columns = builder.add(costs - least)
        builder.rows.append(Row(columns, np.ones(columns.size), 1.0, 1.0))
    sizes = [costs.size for costs in space.costs]
    builder.first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def classes(rows: Array) -> tuple[Indices, Indices]:
    """Equal rows of a matrix: the class of each row, and the first row of each class."""
    known: dict[bytes, int] = {}
    of = np.array([known.setdefault(row.tobytes(), len(known)) for row in np.ascontiguousarray(rows)], dtype=np.int64)
    return of, np.unique(of, return_index=True)[1]


def _add_edge(builder: _ProgramBuilder, u: int, v: int, costs: Array) -> None:
    """e[u,v,A,B] and the two families of sums that tie them to s."""
    of_u, first_u = classes(costs)
    of_v, first_v = classes(costs.T)
    joint = costs[np.ix_(first_u, first_v)]
    allowed = np.isfinite(joint)
    columns = np.full(joint.shape, -1, dtype=np.int64)
    columns[allowed] = builder.add(joint[allowed])
    builder.edges.append(EdgeColumns(u, v, of_u, of_v, columns))
    for node, of, table in ((u, of_u, columns), (v, of_v, columns.T)):
        for number, pairs in enumerate(table):
            here = pairs[pairs >= 0]
            node_columns = builder.first[node] + np.flatnonzero(of == number)
            values = np.concatenate([np.ones(here.size), -np.ones(node_columns.size)])
            builder.rows.append(Row(np.concatenate([here, node_columns]), values, 0.0, 0.0))


def _usage_rows(builder: _ProgramBuilder, space: Workspace) -> list[tuple[Indices, Array]]:
    """Columns and bytes of each memory row."""
    parts: dict[int, list[tuple[Indices, Array]]] = {}
    for v, held in enumerate(space.usages):
        columns = np.arange(builder.first[v], builder.first[v + 1])
        for first, last, used in held:
            for row in range(first, last):
                parts.setdefault(row, []).append((columns, used))
    return [
        (np.concatenate([c for c, _ in parts[row]]), np.concatenate([b for _, b in parts[row]]))
        for row in sorted(parts)
    ]


def _add_memory(builder: _ProgramBuilder, space: Workspace, limit_bytes: float) -> None:
    """Memory rows, each less the least that its nodes must use, in units of what is then left of the limit."""
    count = max((last for held in space.usages for _, last, _ in held), default=0)
    least, most = np.zeros(count), np.zeros(count)
    for held in space.usages:
        for first, last, used in held:
            least[first:last] += float(used.min())
    limit = limit_bytes + abs(limit_bytes) * FIT_TOLERANCE
    builder.feasible &= limit >= least.max(initial=0.0)
    if not builder.feasible:
        return
    for held in space.usages:
        for first, last, used in held:
            most[first:last] += float((used - used.min()).max())
    binding = np.flatnonzero(most > limit - least)
    upper = builder.upper[: len(space.costs)]  # one array a node, in order
    parts: dict[int, list[tuple[Indices, Array]]] = {int(row): [] for row in binding}
    for v, held in enumerate(space.usages):
        columns = np.arange(builder.first[v], builder.first[v + 1])
        for first, last, used in held:
            extra = used - used.min()
            upper[v][extra > limit - least[first:last].max()] = 0.0
            some = extra > 0
            part = (columns[some], extra[some])
            for row in binding[slice(*np.searchsorted(binding, (first, last)))]:
                parts[int(row)].append(part)
    for row, terms in parts.items():
        left = float(limit - least[row])
        unit = left if left > 0 else float(most[row])
        columns, values = (np.concatenate([part[i] for part in terms]) for i in (0, 1))
        builder.rows.append(Row(columns.astype(np.int64), values / unit, -math.inf, left / unit))
