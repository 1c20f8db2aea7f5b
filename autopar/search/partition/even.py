"""`even_stages`: runs of layers for stages that are all to take the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.stages import Layers

_ROUNDING = 1e-9


def even_stages(layers: Layers, stages: int) -> tuple[tuple[str, ...], ...]:
    """Ids of the operators of the forward pass, by stage; FLOPs are dealt as `even_ends` says."""
    ends = even_ends(layers.flops, stages)
    runs = zip((0, *ends), ends, strict=False)
    return tuple(tuple(id for layer in layers.members[a:b] for id in layer) for a, b in runs)


def even_ends(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Ends (exclusive) of ``count`` runs, none empty, whose heaviest is as light as can be; of those the most even.

    Of a stack of equal blocks whose number ``count`` divides, with less than a block before or behind it, that is as
    many blocks for each.

    Args:
        weights: of the layers, as many as there are runs or more.
        count: number of runs.
    """
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    n = len(sums) - 1
    # [first, end]: weight of a run
    runs = np.where(np.arange(n + 1)[:, None] < np.arange(n + 1), sums - sums[:, None], np.inf)
    heaviest = runs[0]
    for _ in range(count - 1):
        heaviest = np.maximum(heaviest[:, None], runs).min(axis=0)
    squares = np.where(runs <= heaviest[n] * (1 + _ROUNDING), runs, np.inf) ** 2
    total, firsts = squares[0], [np.zeros(n + 1, np.int64)]
    for _ in range(count - 1):
        every = total[:, None] + squares
        firsts.append(np.argmin(every, axis=0))
        total = every.min(axis=0)
    ends = [n]
    for first in reversed(firsts[1:]):
        ends.append(int(first[ends[-1]]))
    return tuple(reversed(ends))
