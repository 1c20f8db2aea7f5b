"""Nodes that follow others taken out: most edges of a real program allow one strategy for each of the other's.

Such an edge makes its two nodes one: if u's strategy is f(v's) wherever the cost is finite, then

    c_v[k] += c_u[f(k)] + C_uv[f(k), k]            C_vw[k, j] += C_uw[f(k), j]

and u's memory is v's too, at u's time. In the contest's problems this leaves 1 in 5 to 1 in 100 of the nodes, and
nearly always nothing that is forbidden. Strategies that some neighbour has no strategy for go first (arc consistency:
Mackworth, Artificial Intelligence 8, 1977), for what they forbid hides what follows. Rounds of both, until neither
finds anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.lagrange.pool import Map, Mask, Pool
from autopar.solver.problem import Array, ChoiceProblem


@dataclass(frozen=True, eq=False)
class Contracted:
    """A choice problem in which each node is merged with those whose strategy decides its own.

    Args:
        costs: by original number of each node that is left the costs of its strategies.
        edges: cost tables between nodes that are left, by (lower, higher number); parallel edges are summed.
        leader: for each original node the node that decides it; a node that is left decides itself.
        strategies: for each original node its original strategy, indexed by the leader's strategy.
    """

    costs: Mapping[int, Array]
    edges: Mapping[tuple[int, int], Array]
    leader: tuple[int, ...]
    strategies: tuple[Map, ...]


def contract(problem: ChoiceProblem) -> Contracted | None:
    """``problem`` without the nodes that follow others; None where nothing is allowed.

    Nodes with one strategy are left without edges.
    """
    pool = Pool()
    costs = {v: node.costs for v, node in enumerate(problem.nodes)}
    leader = list(range(len(costs)))
    place = [pool.identity(node_costs.size) for node_costs in costs.values()]
    parallel: dict[tuple[int, int], list[int]] = {}
    for edge in problem.edges:
        table = pool.table(edge.costs)
        if edge.source < edge.target:
            parallel.setdefault((edge.source, edge.target), []).append(table)
        else:
            parallel.setdefault((edge.target, edge.source), []).append(pool.transpose(table))
    edges = {ends: pool.total(_counted(tables)) for ends, tables in sorted(parallel.items())}
    while True:
        kept = _consistent(costs, edges, pool)
        if kept is None:
            return None
        maps = {v: pool.map(np.flatnonzero(node_costs)) for v, node_costs in kept.items()}
        edges = {(u, v): pool.take(table, maps[u], maps[v]) for (u, v), table in edges.items()}
        costs = {v: node_costs[pool.maps[maps[v]]] for v, node_costs in costs.items()}
        place = [pool.compose(node_costs, maps[at]) for node_costs, at in zip(place, leader, strict=True)]
        followers = _followers(costs, edges, pool)
        if not followers:
            break
        costs, edges = _merged(costs, edges, followers, pool)
        for v, at in enumerate(leader):
            if at in followers:
                leader[v], place[v] = followers[at][0], pool.compose(place[v], followers[at][1])
        costs, edges = _folded(costs, edges, pool)
    costs, edges = _folded(costs, edges, pool)
    tables = {ends: pool.tables[table] for ends, table in edges.items()}
    return Contracted(costs, tables, tuple(leader), tuple(pool.maps[node_costs] for node_costs in place))


def _counted(tables: Sequence[int]) -> tuple[tuple[int, int], ...]:
    counts: dict[int, int] = {}
    for table in tables:
        counts[table] = counts.get(table, 0) + 1
    return tuple(sorted(counts.items()))


def _consistent(costs: Mapping[int, Array], edges: Mapping[tuple[int, int], int], pool: Pool) -> dict[int, Mask] | None:
    """Marks of the strategies that every neighbour has a strategy for; None where a node has none."""
    kept = {v: np.isfinite(node_costs) for v, node_costs in costs.items()}
    around: dict[int, list[tuple[int, int, bool]]] = {v: [] for v in costs}
    for (u, v), table in edges.items():
        if not pool.free(table):
            around[u].append((v, table, True))
            around[v].append((u, table, False))
    if not all(node_costs.any() for node_costs in kept.values()):
        return None
    queue = deque(v for v in costs if around[v])
    queued = set(queue)
    while queue:
        v = queue.popleft()
        queued.discard(v)
        for u, table, columns in around[v]:
            left = kept[u] & pool.allowed(table, kept[v], columns)
            if left.sum() < kept[u].sum():
                if not left.any():
                    return None
                kept[u] = left
                if u not in queued:
                    queue.append(u)
                    queued.add(u)
    return kept


def _followers(
    costs: Mapping[int, Array], edges: Mapping[tuple[int, int], int], pool: Pool
) -> dict[int, tuple[int, int]]:
    """Nodes that follow another: who it is, which itself follows none, and the map from its strategies."""
    above: dict[int, tuple[int, int]] = {}

    def top(v: int) -> tuple[int, int]:
        """The node that v follows in the end, with the map; shortens the way there."""
        way = []
        while v in above:
            way.append(v)
            v = above[v][0]
        for low in reversed(way[:-1]):
            high, step = above[low]
            above[low] = (v, pool.compose(step, above[high][1]))
        return (v, above[way[0]][1]) if way else (v, pool.identity(costs[v].size))

    for (u, v), table in edges.items():
        if costs[u].size == 1 or costs[v].size == 1:
            continue
        rows, columns = pool.follows(table)
        if rows is None and columns is None:
            continue
        (up_u, map_u), (up_v, map_v) = top(u), top(v)
        if up_u == up_v:
            continue
        # u = rows[v] and u = map_u[up_u], so up_u follows v where map_u can be undone.
        back_u, back_v = pool.inverse(map_u), pool.inverse(map_v)
        if rows is not None and back_u is not None:
            above[up_u] = (up_v, pool.compose(back_u, pool.compose(rows, map_v)))
        elif columns is not None and back_v is not None:
            above[up_v] = (up_u, pool.compose(back_v, pool.compose(columns, map_u)))
    return {v: top(v) for v in sorted(above)}


def _merged(
    costs: Mapping[int, Array],
    edges: Mapping[tuple[int, int], int],
    followers: Mapping[int, tuple[int, int]],
    pool: Pool,
) -> tuple[dict[int, Array], dict[tuple[int, int], int]]:
    """Costs and edges of the nodes that follow none."""
    left = {v: node_costs.copy() for v, node_costs in costs.items() if v not in followers}
    for v, (top, steps) in followers.items():
        left[top] += costs[v][pool.maps[steps]]
    parallel: dict[tuple[int, int], list[int]] = {}
    for (u, v), table in edges.items():
        top_u, map_u = followers[u] if u in followers else (u, pool.identity(costs[u].size))
        top_v, map_v = followers[v] if v in followers else (v, pool.identity(costs[v].size))
        if top_u == top_v:
            left[top_u] += pool.diagonal(table, map_u, map_v)
            continue
        seen = pool.take(table, map_u, map_v)
        if top_u < top_v:
            parallel.setdefault((top_u, top_v), []).append(seen)
        else:
            parallel.setdefault((top_v, top_u), []).append(pool.transpose(seen))
    return left, {ends: pool.total(_counted(tables)) for ends, tables in parallel.items()}


def _folded(
    costs: Mapping[int, Array], edges: Mapping[tuple[int, int], int], pool: Pool
) -> tuple[dict[int, Array], dict[tuple[int, int], int]]:
    """Edges that are a row term plus a column term go into their nodes, as all do at a node of one strategy."""
    folded = {v: node_costs.copy() for v, node_costs in costs.items()}
    left = {}
    for (u, v), table in edges.items():
        terms = pool.separated(table)
        if terms is None:
            left[u, v] = table
        else:
            folded[u] += terms[0]
            folded[v] += terms[1]
    return folded, left
