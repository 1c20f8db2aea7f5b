"""Inner loops over a `PackedGraph`: messages, decoding, cost; and over its `PackedMemory`: prices and bytes by row."""

from __future__ import annotations

import numpy as np

from autopar.solver.compiled import add, add_scaled, compiled, first_least, least_sums
from autopar.solver.lagrange.packed import Ints, PackedGraph, PackedMemory
from autopar.solver.problem import Array


@compiled
def sweep(graph: PackedGraph, costs: Array, messages: Array, forward: bool) -> float:
    """One sweep of TRW-S over all nodes (see `autopar.solver.messages`); a lower bound of the least cost."""
    count = graph.first.size - 1
    bound = 0.0
    for step in range(count):
        v = step if forward else count - 1 - step
        total = costs[graph.first[v] : graph.first[v + 1]].copy()
        size = total.size
        for e in range(graph.edges[v], graph.edges[v + 1]):
            add(total, messages[graph.gets[e] : graph.gets[e] + size])
        least = total[first_least(total)]
        bound += least
        total -= least
        total *= graph.share[v]
        for e in range(graph.edges[v], graph.edges[v + 1]):
            u = graph.other[e]
            if (u > v) == forward:
                wide = graph.first[u + 1] - graph.first[u]
                message = messages[graph.sends[e] : graph.sends[e] + wide]
                table = graph.tables[graph.own_rows[e] : graph.own_rows[e] + size * wide]
                least_sums(total - messages[graph.gets[e] : graph.gets[e] + size], table, message)
                low = message[first_least(message)]
                message -= low
                bound += low
    return bound


@compiled
def decode(graph: PackedGraph, costs: Array, messages: Array, forward: bool) -> Ints:
    """In order, each node's cheapest strategy given those before it and the messages from those after it."""
    count = graph.first.size - 1
    choice = np.zeros(count, dtype=np.int64)
    for step in range(count):
        v = step if forward else count - 1 - step
        total = costs[graph.first[v] : graph.first[v + 1]].copy()
        size = total.size
        for e in range(graph.edges[v], graph.edges[v + 1]):
            u = graph.other[e]
            if (u < v) == forward:
                at = graph.own_columns[e] + choice[u] * size
                add(total, graph.tables[at : at + size])
            else:
                add(total, messages[graph.gets[e] : graph.gets[e] + size])
        choice[v] = first_least(total)
    return choice


@compiled
def descend(graph: PackedGraph, costs: Array, choice: Ints, rounds: int) -> None:
    """Each node in order to its cheapest strategy given all others, while anything changes (ICM: Besag, 1986)."""
    for _ in range(rounds):
        changed = False
        for v in range(graph.first.size - 1):
            total = costs[graph.first[v] : graph.first[v + 1]].copy()
            size = total.size
            for e in range(graph.edges[v], graph.edges[v + 1]):
                at = graph.own_columns[e] + choice[graph.other[e]] * size
                add(total, graph.tables[at : at + size])
            best = first_least(total)
            if total[best] < total[choice[v]]:
                choice[v] = best
                changed = True
        if not changed:
            break


@compiled
def cost_of(graph: PackedGraph, costs: Array, choice: Ints) -> float:
    """Sum of the costs of nodes and edges of a choice."""
    total = 0.0
    for v in range(graph.first.size - 1):
        total += costs[graph.first[v] + choice[v]]
        for e in range(graph.edges[v], graph.edges[v + 1]):
            u = graph.other[e]
            if u > v:
                total += graph.tables[graph.own_rows[e] + choice[v] * (graph.first[u + 1] - graph.first[u]) + choice[u]]
    return total


@compiled
def priced(memory: PackedMemory, first: Ints, costs: Array, prices: Array) -> Array:
    """Costs with each row's bytes at its price; ``first`` is the graph's."""
    sums = np.zeros(prices.size + 1)
    for row in range(prices.size):
        sums[row + 1] = sums[row] + prices[row]
    with_prices = costs.copy()
    for run in range(memory.node.size):
        price = sums[memory.stop[run]] - sums[memory.start[run]]
        if price > 0.0:
            at = first[memory.node[run]]
            held = memory.bytes[memory.first[run] : memory.first[run + 1]]
            add_scaled(with_prices[at:], held, price)
    return with_prices


@compiled
def held_by(memory: PackedMemory, choice: Ints) -> Array:
    """Bytes that a choice uses in each memory row."""
    change = np.zeros(memory.base.size + 1)
    for run in range(memory.node.size):
        held = memory.bytes[memory.first[run] + choice[memory.node[run]]]
        change[memory.start[run]] += held
        change[memory.stop[run]] -= held
    row_bytes, total = memory.base.copy(), 0.0
    for row in range(row_bytes.size):
        total += change[row]
        row_bytes[row] += total
    return row_bytes
