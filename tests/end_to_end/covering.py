"""Combinations that hold every pair of values of any two factors at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence


def pairs_of(cell: Sequence[Hashable]) -> set[tuple]:
    """Pairs of (factor, value) in a combination."""
    return set(itertools.combinations(enumerate(cell), 2))


def covering(factors: Sequence[Sequence[Hashable]], allowed: Callable[..., bool]) -> list[tuple]:
    """Few of the allowed combinations that together have every pair that any of them has; always the same ones.

    Args:
        factors: the values of each.
        allowed: whether a combination can be.
    """
    cells = [cell for cell in itertools.product(*factors) if allowed(*cell)]
    missing = set().union(*map(pairs_of, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of(cell) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
