"""The inner loop of `messages`, over flat arrays; imported when it is used, for it may load numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.solver.compiled import add, compiled, first_least, least_sums, put, raise_to
from autopar.solver.problem import Array

Ints = NDArray[np.int64]


class Flat(NamedTuple):
    """The state of `autopar.solver.messages.Messages` as arrays.

    Args:
        first: where each node's strategies start; one more at the end.
        edges: where each node's half-edges start; one more at the end.
        other: the neighbour, by half-edge.
        outbound, inbound: slots of the messages to and from it.
        table: where the edge starts in ``tables``, own strategies by the neighbour's.
        slot: where each slot starts in ``messages``.
        ahead: share of a node's cost that each message takes.
        tables, costs, messages, taken, gains, marginals, excess: see `Messages`.
    """

    first: Ints
    edges: Ints
    other: Ints
    outbound: Ints
    inbound: Ints
    table: Ints
    slot: Ints
    ahead: Array
    tables: Array
    costs: Array
    messages: Array
    taken: Array
    gains: Array
    marginals: Array
    excess: Array


@compiled
def sweep(flat: Flat, forward: bool, valid: bool, known: float, slack: float) -> float:
    """Visits all nodes; ``valid`` where ``known`` is the sum of all that was taken. Returns the sum of magnitudes.

    Compiled or not, every sum is in the same order: the same problem gives the same bits.
    """
    count = flat.first.size - 1
    magnitude = 0.0
    for step in range(count):
        v = step if forward else count - 1 - step
        begin, end = flat.first[v], flat.first[v + 1]
        size = end - begin
        total = flat.costs[begin:end].copy()
        known -= flat.gains[v]
        for e in range(flat.edges[v], flat.edges[v + 1]):
            at = flat.slot[flat.inbound[e]]
            add(total, flat.messages[at : at + size])
            if (flat.other[e] < v) == forward:
                known += flat.taken[flat.inbound[e]] - flat.taken[flat.outbound[e]]
        if valid:
            raise_to(flat.marginals[begin:end], total, known - slack)
        least = total[first_least(total)]
        magnitude += abs(least)
        total -= least
        put(flat.excess[begin:end], total)
        total *= flat.ahead[v]
        for e in range(flat.edges[v], flat.edges[v + 1]):
            u = flat.other[e]
            if (u > v) == forward:
                wide = flat.first[u + 1] - flat.first[u]
                back, out = flat.slot[flat.inbound[e]], flat.slot[flat.outbound[e]]
                message = flat.messages[out : out + wide]
                table = flat.tables[flat.table[e] : flat.table[e] + size * wide]
                least_sums(total - flat.messages[back : back + size], table, message)
                part = message[first_least(message)]
                message -= part
                flat.taken[flat.outbound[e]] = part
                magnitude += abs(part)
        flat.gains[v] = least
        known += least
    return magnitude
