"""The inner loop of `messages`, over flat arrays; `autopar.solver.compiled` has it compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.solver import plain
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

    def listed(self) -> Flat:
        """The state with positions as lists."""
        positions: dict[str, Any] = {name: getattr(self, name).tolist() for name in self._fields[:7]}
        return self._replace(**positions)


#: (state, whether forward, whether the sum is known, that sum, its rounding error) -> sum of magnitudes.
Sweep: TypeAlias = Callable[[Flat, bool, bool, float, float], float]


def sweeping(
    add: Callable[[Array, Array], Any],
    first_least: Callable[[Array], int],
    least_sums: Callable[[Array, Array, Array], Any],
    put: Callable[[Array, Array], Any],
    raise_to: Callable[[Array, Array, float], Any],
) -> Sweep:
    """The loop over all nodes, made of loops over arrays: those of `autopar.solver.plain`, or compiled ones."""

    def sweep(flat: Flat, forward: bool, valid: bool, known: float, tolerance: float) -> float:
        """Visits all nodes; ``valid`` where ``known`` is the sum of all that was taken. Returns the sum of magnitudes.

        Compiled or not, every sum is in the same order: the same problem gives the same bits.
        """
        first, edges, other, table_at, slot = flat.first, flat.edges, flat.other, flat.table, flat.slot
        outbound, inbound, messages, taken, gains = flat.outbound, flat.inbound, flat.messages, flat.taken, flat.gains
        count = len(first) - 1
        magnitude = 0.0
        for step in range(count):
            v = step if forward else count - 1 - step
            begin, end = first[v], first[v + 1]
            size = end - begin
            total = flat.costs[begin:end].copy()
            known -= gains[v]
            for e in range(edges[v], edges[v + 1]):
                at = slot[inbound[e]]
                add(total, messages[at : at + size])
                if (other[e] < v) == forward:
                    known += taken[inbound[e]] - taken[outbound[e]]
            if valid:
                raise_to(flat.marginals[begin:end], total, known - tolerance)
            least = total[first_least(total)]
            magnitude += abs(least)
            total -= least
            put(flat.excess[begin:end], total)
            total *= flat.ahead[v]
            for e in range(edges[v], edges[v + 1]):
                u = other[e]
                if (u > v) == forward:
                    wide = first[u + 1] - first[u]
                    back, out = slot[inbound[e]], slot[outbound[e]]
                    message = messages[out : out + wide]
                    table = flat.tables[table_at[e] : table_at[e] + size * wide]
                    least_sums(total - messages[back : back + size], table, message)
                    part = message[first_least(message)]
                    message -= part
                    taken[outbound[e]] = part
                    magnitude += abs(part)
            gains[v] = least
            known += least
        return magnitude

    return sweep


#: The loop in numpy, for a state whose positions are lists: the interpreter reads these faster than arrays.
plain_sweep: Sweep = sweeping(plain.add, plain.first_least, plain.least_sums, plain.put, plain.raise_to)
