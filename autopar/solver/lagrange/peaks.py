"""The largest of many sums under additions to ranges of them: a segment tree in two arrays of twice a power of two."""

from __future__ import annotations

import numpy as np

from autopar.solver.compiled import compiled, put
from autopar.solver.problem import Array


@compiled
def make_peaks(values: Array) -> tuple[Array, Array]:
    """The tree over ``values``: the largest below each position (the root is 1), and what is added to all below it."""
    leaves = 1
    while leaves < values.size:
        leaves *= 2
    largest, added = np.full(2 * leaves, -np.inf), np.zeros(2 * leaves)
    put(largest[leaves:], values)
    for i in range(leaves - 1, 0, -1):
        largest[i] = max(largest[2 * i], largest[2 * i + 1])
    return largest, added


@compiled
def add_range(largest: Array, added: Array, start: int, stop: int, amount: float) -> None:
    """Adds to the values of ``start`` until ``stop``."""
    leaves = largest.size // 2
    low, high = start + leaves, stop + leaves
    left, right = low // 2, (high - 1) // 2
    while low < high:
        if low % 2 == 1:
            largest[low] += amount
            added[low] += amount
            low += 1
        if high % 2 == 1:
            high -= 1
            largest[high] += amount
            added[high] += amount
        low //= 2
        high //= 2
    while left >= 1:
        largest[left] = max(largest[2 * left], largest[2 * left + 1]) + added[left]
        if right != left:
            largest[right] = max(largest[2 * right], largest[2 * right + 1]) + added[right]
        left //= 2
        right //= 2
