"""`slice_lengths`: how to cut a sequence into slices that a pipeline takes one after another.

From TeraPipe (Li et al., ICML'21). Positions of a causal model read only earlier ones, so a stage can pass on a slice
of tokens before it takes the next. With t(l, c) seconds of a stage for l tokens behind c earlier ones, K stages take

    T = sum_i t(l_i, l_1 + ... + l_(i-1)) + (K - 1) max_i t_i        (equation 5)

For every candidate for the maximum the least sum is a dynamic program over prefixes (section 3.3, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import ScheduleError


@dataclass(frozen=True)
class Slices:
    """A cut of a sequence.

    Args:
        lengths: tokens of each slice, from the first.
        seconds: T of the whole pass through the pipeline.
    """

    lengths: tuple[int, ...]
    seconds: float


def pass_seconds(lengths: tuple[int, ...], stages: float, seconds: Callable[[int, int], float]) -> float:
    """T of slices of these lengths.

    Args:
        lengths: tokens of each slice.
        stages: K.
        seconds: t(tokens of a slice, tokens before it) of one stage.
    """
    times, before = [], 0
    for length in lengths:
        times.append(seconds(length, before))
        before += length
    return sum(times) + (stages - 1) * max(times)


def slice_lengths(
    tokens: int, stages: float, seconds: Callable[[int, int], float], *, unit: int = 8, tolerance_s: float = 0.0
) -> Slices:
    """The slices with the least T, in multiples of ``unit`` tokens.

    Args:
        tokens: of the sequence.
        stages: K; 1 + (K - 1) / m where m sequences follow each other.
        seconds: t(tokens of a slice, tokens before it) of one stage; positive.
        unit: what lengths are multiples of; divides ``tokens``.
        tolerance_s: candidates for the longest slice that are closer than this are taken for one; T is then within
            ``stages * tolerance_s`` of the least.

    Raises:
        ScheduleError: ``unit`` does not divide ``tokens``.
    """
    if tokens < 1 or unit < 1 or tokens % unit:
        raise ScheduleError(f"{tokens} tokens are not a multiple of {unit}", remedy="give a unit that divides them")
    count = tokens // unit
    times = {(k, b): seconds(k * unit, b * unit) for k in range(1, count + 1) for b in range(count - k + 1)}
    best, last = math.inf, -math.inf
    best_lengths: tuple[int, ...] = (tokens,)
    for longest in sorted(set(times.values())):
        if (stages - 1) * longest >= best:
            break
        if longest - last < tolerance_s:
            continue
        last = longest
        sliced = _least_sum(count, times, longest + tolerance_s)
        if sliced is None:
            continue
        lengths = tuple(k * unit for k in sliced)
        total = pass_seconds(lengths, stages, seconds)
        if total < best:
            best, best_lengths = total, lengths
    return Slices(best_lengths, best)


def _least_sum(count: int, times: dict[tuple[int, int], float], longest: float) -> tuple[int, ...] | None:
    """Lengths in units with the least sum of times, none over ``longest``; None: there are none."""
    sums, lengths = [0.0] + [math.inf] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        for k in range(1, end + 1):
            time = times[k, end - k]
            if time <= longest and sums[end - k] + time < sums[end]:
                sums[end], lengths[end] = sums[end - k] + time, k
    if math.isinf(sums[count]):
        return None
    sliced, end = [], count
    while end:
        sliced.append(lengths[end])
        end -= lengths[end]
    return tuple(reversed(sliced))
