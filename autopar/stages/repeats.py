"""Repeated blocks in a sequence: the layers that a model is a stack of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

#: Blocks are taken for layers only where there are so many of them, and they are most of the work.
FEWEST_BLOCKS, LEAST_SHARE = 3, 0.5
_GAPS = 64  # a block has at most so many operators that look like its heaviest


@dataclass(frozen=True)
class Repeats:
    """A stretch of a sequence that repeats: ``[start + i * period, start + (i + 1) * period)`` for ``count`` of i.

    The elements are equal one by one for every shift by a period, so any phase would do; see `phased`.

    Args:
        start: first element.
        period: elements of a block.
        count: whole blocks.
        extra: elements behind the last whole block that go on like it.
    """

    start: int
    period: int
    count: int
    extra: int

    def phased(self, cost: np.ndarray) -> Repeats:
        """The same blocks begun later, where ``cost[i]``, of a cut behind element i, is least; the first of equals.

        A block is given up for it only where the extra elements do not make one.
        """

        def of(shift: int) -> tuple[float, int]:
            ends = self.start + shift - 1 + self.period * np.arange(1, self.count)
            return float(cost[ends].max()), shift

        shift = min((of(k) for k in range(self.period)), default=(0.0, 0))[1]
        count = self.count - (shift > self.extra)
        return Repeats(self.start + shift, self.period, count, (self.extra - shift) % self.period)


def find_repeats(sequence: Sequence[Hashable], weights: np.ndarray) -> Repeats | None:
    """The blocks that make up most of ``sequence``; None where there are none.

    Args:
        sequence: what is compared.
        weights: of each element; blocks hold at least `LEAST_SHARE` of the sum. The shortest period that does is taken.
    """
    total = float(weights.sum())
    if len(sequence) < FEWEST_BLOCKS or total <= 0:
        return None
    ids: dict[Hashable, int] = {}
    coded = np.array([ids.setdefault(x, len(ids)) for x in sequence])
    heaviest = int(np.argmax(np.bincount(coded, weights=weights)))
    at = np.flatnonzero(coded == heaviest)
    gaps = [at[k:] - at[:-k] for k in range(1, min(_GAPS, len(at) - 1) + 1)]
    periods = sorted({int(np.bincount(g).argmax()) for g in gaps if g.size})
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    for period in periods:
        start, length = _longest(coded[:-period] == coded[period:])
        count = (length + period) // period
        if count < FEWEST_BLOCKS or length == 0:
            continue
        if sums[start + count * period] - sums[start] >= LEAST_SHARE * total:
            return Repeats(start, period, count, (length + period) % period)
    return None


def _longest(equal: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of true entries; the first of equals."""
    edges = np.diff(np.concatenate([[0], equal.astype(np.int8), [0]]))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not starts.size:
        return 0, 0
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best] - starts[best])
