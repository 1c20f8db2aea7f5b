"""Exact minimization without memory by eliminating nodes one by one (min-sum bucket elimination).

Dechter, "Bucket elimination", Artificial Intelligence 113 (1999). Eliminating v makes a table over its neighbours N:

    T_v[k, N] = c_v[k] + sum of edges and messages that v is in        m_v[N] = min_k T_v[k, N]

and m_v joins the bucket of the neighbour that is eliminated next. A second pass, from the last node back, gives the
min-marginals: the least cost of any choice that takes strategy k of node v. Time and memory grow with the product of
strategies over v and N; programs are nearly chains, so tables stay small. The order is found once and serves
any node costs, which is what a search over multipliers needs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.meter import Meter, Work
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.workspace import Workspace

#: Most entries of one table.
MOST_ENTRIES = 1 << 21
_MOST_TOTAL = 1 << 26  # in all: half a GiB


@dataclass(frozen=True, eq=False)
class Bucket:
    """One step of the elimination.

    Args:
        node: eliminated here.
        scope: neighbours at that moment, in the order of their own elimination.
        shape: strategies of node and scope.
        fixed: sum of the edges between node and scope, laid out in ``shape`` (broadcast).
        parent: position of the bucket that gets the message; -1 where ``scope`` is empty.
    """

    node: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    fixed: tuple[Array, ...]
    parent: int


@dataclass(frozen=True, eq=False)
class Elimination:
    """An order of elimination for one graph.

    Args:
        buckets: its steps.
        entries: of all tables.
        meter: counts them.
    """

    buckets: tuple[Bucket, ...]
    entries: int
    meter: Meter

    def least(self, costs: Sequence[Array]) -> tuple[float, tuple[int, ...], list[Array]]:
        """The least total under node ``costs``, its choice (the first of equals, from the last bucket on) and tables.

        The tables are what `marginals` needs.
        """
        self.meter.add(Work.ELIMINATED, self.entries)
        tables: list[Array] = []
        messages: list[list[tuple[tuple[int, ...], Array]]] = [[] for _ in self.buckets]
        total = 0.0
        for bucket, received in zip(self.buckets, messages, strict=True):
            table = np.zeros(bucket.shape) + _lay(costs[bucket.node], (bucket.node,), bucket)
            for part in bucket.fixed:
                table += part
            for scope, message in received:
                table += _lay(message, scope, bucket)
            received.clear()
            tables.append(table)
            out = table.min(axis=0)
            if bucket.parent < 0:
                total += float(out)
            else:
                messages[bucket.parent].append((bucket.scope, np.asarray(out)))
        choice = [0] * len(self.buckets)
        for bucket, table in zip(reversed(self.buckets), reversed(tables), strict=True):
            for u in reversed(bucket.scope):
                table = table[..., choice[u]]
            choice[bucket.node] = int(table.argmin())
        return total, tuple(choice), tables

    def marginals(self, total: float, tables: list[Array]) -> list[Array]:
        """Least total cost with each strategy of each node; overwrites ``tables`` (those of `least`)."""
        self.meter.add(Work.ELIMINATED, self.entries)
        marginals: list[Array] = [np.zeros(0)] * len(tables)
        for at in range(len(tables) - 1, -1, -1):
            bucket, table = self.buckets[at], tables[at]
            message = table.min(axis=0)
            if bucket.parent < 0:
                rest = np.array(total - message)
            else:
                above = self.buckets[bucket.parent]
                spare = tuple(i for i, u in enumerate((above.node, *above.scope)) if u not in bucket.scope)
                with np.errstate(invalid="ignore"):
                    rest = tables[bucket.parent].min(axis=spare) - message
                rest[np.isnan(rest)] = math.inf  # inf - inf: forbidden below and above
            table += rest
            marginals[bucket.node] = table.reshape(table.shape[0], -1).min(axis=1)
        return marginals


def _lay(values: Array, scope: tuple[int, ...], bucket: Bucket) -> Array:
    """``values`` over ``scope`` (in order of elimination) broadcastable to the bucket's table."""
    shape = [n if u in scope else 1 for u, n in zip((bucket.node, *bucket.scope), bucket.shape, strict=True)]
    return values.reshape(shape)


def plan_elimination(problem: ChoiceProblem, most_entries: int = MOST_ENTRIES) -> Elimination | None:
    """An order in which tables stay small: always the node of the smallest table, the first of equals.

    Args:
        problem: its usages and limit do not matter.
        most_entries: of one table.

    Returns None where some table, or all together, would be too large.
    """
    problem.meter.add(Work.REDUCED, problem.parts)
    space = Workspace.of(problem, ())
    sizes = [costs.size for costs in space.costs]
    around = [set(edges) for edges in space.edges]

    def weight(v: int) -> int:
        return sizes[v] * math.prod(sizes[u] for u in around[v])

    heap = [(weight(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    position: dict[int, int] = {}
    scopes: list[tuple[int, set[int]]] = []
    entries = 0
    while heap:
        size, v = heapq.heappop(heap)
        if v in position or size != weight(v):
            continue
        entries += size
        if size > most_entries or entries > _MOST_TOTAL:
            return None
        position[v] = len(scopes)
        scopes.append((v, around[v]))
        for u in around[v]:
            around[u] |= around[v]
            around[u] -= {u, v}
        for u in sorted(around[v]):
            heapq.heappush(heap, (weight(u), u))
    buckets = tuple(_bucket(space, v, scope, position) for v, scope in scopes)
    return Elimination(buckets, entries, problem.meter)


def _bucket(space: Workspace, v: int, around: set[int], position: dict[int, int]) -> Bucket:
    scope = tuple(sorted(around, key=position.__getitem__))
    shape = tuple(space.costs[u].size for u in (v, *scope))
    parent = position[scope[0]] if scope else -1
    bare = Bucket(v, scope, shape, (), parent)
    fixed = tuple(_lay(np.ascontiguousarray(space.edges[v][u]), (v, u), bare) for u in scope if u in space.edges[v])
    return Bucket(v, scope, shape, fixed, parent)
