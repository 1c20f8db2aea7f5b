"""Local search by trees: random trees of the graph re-decided exactly by dynamic programming, all else as it is.

A tree here is a set of nodes of whose edges those inside form a tree; its best strategies given the nodes around it
take one pass up and one down (the blocks of Hamze and de Freitas, UAI'04, as moves). Memory is priced during the pass,
at the multipliers of the dual times ``weight``, and counted exactly before a move is taken: one that
exceeds the limit is not. With ``noise`` the pass minimizes randomly disturbed costs (perturb and MAP: Papandreou and
Yuille, ICCV'11) and its result is taken whatever it costs; without, only what is cheaper at these prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.solver.compiled import add, add_scaled, compiled, first_least, least_of_rows, put
from autopar.solver.lagrange.packed import Ints, PackedGraph, PackedMemory
from autopar.solver.lagrange.peaks import add_range
from autopar.solver.problem import Array

_MOST_CANDIDATES = 4096


class State(NamedTuple):
    """State of a search.

    Args:
        choice: strategy of each node.
        largest: segment tree over the bytes of each row: the largest below each position; the root is 1.
        added: bytes that are added to all rows below a position of the segment tree.
        best: the cheapest choice seen that obeys the limit.
        figures: cost of ``choice``, cost of ``best``; numbers of moves taken, refused for memory.
    """

    choice: Ints
    largest: Array
    added: Array
    best: Ints
    figures: Array


class Draws(NamedTuple):
    """Random numbers, used from ``at[0]`` on, over and over.

    Args:
        uniform: in [0, 1).
        exponential: of mean 1.
        at: a counter.
    """

    uniform: Array
    exponential: Array
    at: Ints


@compiled
def draw(draws: Draws, below: int) -> int:
    """A random integer from 0 until ``below``."""
    draws.at[0] = (draws.at[0] + 1) % draws.uniform.size
    return int(draws.uniform[draws.at[0]] * below)


@compiled
def switch(memory: PackedMemory, state: State, v: int, old: int, new: int) -> None:
    """Memory of node ``v`` from strategy ``old`` to ``new``."""
    for run in range(memory.runs[v], memory.runs[v + 1]):
        first = memory.first[run]
        amount = memory.bytes[first + new] - memory.bytes[first + old]
        if amount != 0.0:
            add_range(state.largest, state.added, memory.start[run], memory.stop[run], amount)


@compiled
def grow(
    graph: PackedGraph,
    draws: Draws,
    seed: int,
    size: int,
    inside: Ints,
    touched: Ints,
    nodes: Ints,
    parents: Ints,
    by: Ints,
) -> int:
    """A random tree from node ``seed`` on, of at most ``size`` nodes; returns how many.

    Args:
        graph: where.
        draws: random numbers.
        seed: the root.
        size: most nodes.
        inside: place in the tree by node, -1 outside; written.
        touched: number of neighbours in the tree by node, 0 before; written.
        nodes, parents, by: node, place of its parent and half-edge from there, by place; written.
    """
    queue = np.empty(_MOST_CANDIDATES, dtype=np.int64)
    place = np.empty(_MOST_CANDIDATES, dtype=np.int64)
    count, reached = 0, 1
    nodes[0], parents[0], by[0] = seed, -1, -1
    inside[seed] = 0
    v = seed
    while True:
        for e in range(graph.edges[v], graph.edges[v + 1]):
            touched[graph.other[e]] += 1
            if inside[graph.other[e]] < 0 and count < _MOST_CANDIDATES:
                queue[count], place[count] = e, reached - 1
                count += 1
        added = False
        while count > 0 and reached < size and not added:
            pick = draw(draws, count)
            e, parent = queue[pick], place[pick]
            count -= 1
            queue[pick], place[pick] = queue[count], place[count]
            v = graph.other[e]
            if inside[v] < 0 and touched[v] == 1:
                nodes[reached], parents[reached], by[reached] = v, parent, e
                inside[v] = reached
                reached += 1
                added = True
        if not added:
            return reached


@compiled
def best_on_tree(
    graph: PackedGraph, costs: Array, choice: Ints, noise: float, draws: Draws, inside: Ints,
    nodes: Ints, parents: Ints, by: Ints, totals: Array, back: Ints, new: Ints,
) -> None:  # fmt: skip
    """Writes to ``new`` the cheapest strategies of a tree's ``nodes`` at ``costs``, given the choice elsewhere."""
    count = nodes.size
    for k in range(count):
        v = nodes[k]
        size = graph.first[v + 1] - graph.first[v]
        total = totals[k, :size]
        put(total, costs[graph.first[v] : graph.first[v + 1]])
        if noise > 0.0:
            at = draw(draws, draws.exponential.size - size)
            add_scaled(total, draws.exponential[at : at + size], noise)
        for e in range(graph.edges[v], graph.edges[v + 1]):
            u = graph.other[e]
            if inside[u] < 0:
                at = graph.own_columns[e] + choice[u] * size
                add(total, graph.tables[at : at + size])
    for k in range(count - 1, 0, -1):
        v, up = nodes[k], nodes[parents[k]]
        size, wide = graph.first[v + 1] - graph.first[v], graph.first[up + 1] - graph.first[up]
        at = graph.own_rows[by[k]]
        least_of_rows(totals[k, :size], graph.tables[at : at + size * wide], totals[parents[k], :wide], back[k, :wide])
    new[0] = first_least(totals[0, : graph.first[nodes[0] + 1] - graph.first[nodes[0]]])
    for k in range(1, count):
        new[k] = back[k, new[parents[k]]]


@compiled
def change_of(graph: PackedGraph, costs: Array, choice: Ints, inside: Ints, nodes: Ints, new: Ints) -> float:
    """Change of the cost with the ``new`` strategies of ``nodes``."""
    change = 0.0
    for k in range(nodes.size):
        v = nodes[k]
        size, now, then = graph.first[v + 1] - graph.first[v], choice[v], new[k]
        change += costs[graph.first[v] + then] - costs[graph.first[v] + now]
        for e in range(graph.edges[v], graph.edges[v + 1]):
            u = graph.other[e]
            if inside[u] < 0:
                at = graph.own_columns[e] + choice[u] * size
                change += graph.tables[at + then] - graph.tables[at + now]
            elif inside[u] > k:
                at, wide = graph.own_rows[e], graph.first[u + 1] - graph.first[u]
                change += graph.tables[at + then * wide + new[inside[u]]] - graph.tables[at + now * wide + choice[u]]
    return change


@compiled
def walk(
    graph: PackedGraph, memory: PackedMemory, costs: Array, at_prices: Array, state: State, draws: Draws,
    moves: int, most: int, noise: float,
) -> None:  # fmt: skip
    """So many moves.

    Args:
        graph, memory: the problem.
        costs: of strategies.
        at_prices: the same with memory priced.
        state: changed.
        draws: random numbers.
        moves: trees to try.
        most: nodes of a tree; it has 1 to so many.
        noise: mean of what is added to costs at random; 0 takes improvements only.
    """
    count = graph.first.size - 1
    inside, touched = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    nodes, parents, by = (
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
    )
    totals, back = np.empty((most, graph.widest)), np.empty((most, graph.widest), dtype=np.int64)
    new = np.empty(most, dtype=np.int64)
    choice, figures = state.choice, state.figures
    for _ in range(moves):
        reached = grow(graph, draws, draw(draws, count), 1 + draw(draws, most), inside, touched, nodes, parents, by)
        tree = nodes[:reached]
        best_on_tree(graph, at_prices, choice, noise, draws, inside, tree, parents, by, totals, back, new)
        changed = 0
        for k in range(reached):
            if new[k] != choice[tree[k]]:
                changed += 1
        if changed > 0 and (noise > 0.0 or change_of(graph, at_prices, choice, inside, tree, new) < 0.0):
            allowed = max(memory.limit, state.largest[1])
            for k in range(reached):
                switch(memory, state, tree[k], choice[tree[k]], new[k])
            if state.largest[1] <= allowed:
                figures[0] += change_of(graph, costs, choice, inside, tree, new)
                figures[2] += 1
                for k in range(reached):
                    choice[tree[k]] = new[k]
                if figures[0] < figures[1] and state.largest[1] <= memory.limit:
                    figures[1] = figures[0]
                    for v in range(count):
                        state.best[v] = choice[v]
            else:
                figures[3] += 1
                for k in range(reached):
                    switch(memory, state, tree[k], new[k], choice[tree[k]])
        for k in range(reached):
            v = tree[k]
            inside[v] = -1
            touched[v] = 0
            for e in range(graph.edges[v], graph.edges[v + 1]):
                touched[graph.other[e]] = 0
