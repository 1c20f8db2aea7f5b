"""Strategies that the memory limit forbids by itself: no room is left for them whatever all others take.

With every node at its least, row t has room limit - base_t - sum least. A strategy that takes more than its own least
by more than the room of some row that it is in fits in no choice. Least amounts rise as strategies go, until nothing
changes (bounds consistency of knapsacks: Savelsbergh, ORSA J. Computing 6, 1994).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.solver.compiled import compiled
from autopar.solver.lagrange.packed import Ints, PackedMemory

_TOLERANCE = 1e-9  # of the limit: more than sums may be off by


@compiled
def keep_what_fits(memory: PackedMemory, first: Ints, allowed: NDArray[np.bool_]) -> bool:
    """Takes the marks of strategies that fit in no choice; returns whether a choice may be left.

    Args:
        memory: rows of time.
        first: where each node's strategies start.
        allowed: marks of all strategies; written.
    """
    rows, runs = memory.base.size, memory.node.size
    tolerance = _TOLERANCE * abs(memory.limit)
    least, room = np.zeros(runs), np.zeros(rows)
    changed = True
    while changed:
        changed = False
        change = np.zeros(rows + 1)
        for run in range(runs):
            v, low = memory.node[run], np.inf
            for k in range(first[v + 1] - first[v]):
                if allowed[first[v] + k]:
                    low = min(low, memory.bytes[memory.first[run] + k])
            if low == np.inf:
                return False
            least[run] = low
            change[memory.start[run]] += low
            change[memory.stop[run]] -= low
        held = 0.0
        for row in range(rows):
            held += change[row]
            room[row] = memory.limit - memory.base[row] - held
            if room[row] < -tolerance:
                return False
        for run in range(runs):
            v, most = memory.node[run], least[run] + tolerance
            tight = np.inf
            for row in range(memory.start[run], memory.stop[run]):
                tight = min(tight, room[row])
            for k in range(first[v + 1] - first[v]):
                if allowed[first[v] + k] and memory.bytes[memory.first[run] + k] > most + tight:
                    allowed[first[v] + k] = False
                    changed = True
    return True
