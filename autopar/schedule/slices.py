"""Slices of tokens: schedules whose microbatches pass in slices, and where to cut a sequence.

From TeraPipe (Li et al., ICML'21): a stage passes on a slice of a sequence before it takes the next. Slices are a
second index of microbatches: every pass becomes one a slice, forward from the first to the last, backward from the
last to the first, as later slices owe gradients of keys and values to earlier ones. A stage that waited for a
microbatch waits for a slice, so that a pipeline fills and drains as much faster as there are slices. GPipe with one
microbatch is TeraPipe's schedule. `with_slices` makes a schedule with slices.

Positions of a causal model read only earlier ones, so a stage can pass on a slice of tokens before it takes the next.
With t(l, c) seconds of a stage for l tokens after c earlier ones, K stages take

    T = sum_i t(l_i, l_1 + ... + l_(i-1)) + (K - 1) max_i t_i        (equation 5)

For every candidate for the maximum the least sum is a dynamic program over prefixes (section 3.3, algorithm 1):
`slice_lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.errors import ScheduleError
from autopar.schedule.table import Table, Task

#: Schedules whose updates follow single microbatches, and those of one pass alone.
WITHOUT_SLICES = ("ampnet", "branches", "inference", "pipedream", "pipedream-vertical", "2bw")
_WITH = "gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-h2, zb-v, chimera and tables"


def with_slices(table: Table, count: int) -> Table:
    """``table`` with every pass in ``count`` slices.

    Args:
        table: a schedule of whole microbatches.
        count: slices of each microbatch.

    Raises:
        ScheduleError: the schedule takes no slices; the message lists those that do. Or ``count`` is no count, or the
            table has slices.
    """
    check_takes_slices(table.name)
    if count < 1 or table.num_slices != 1:
        raise ScheduleError(
            f"schedule {table.name} with {table.num_slices} slices was to be cut into {count}",
            remedy="one slice or more, of a table that has none",
        )
    rows = tuple(tuple(part for task in row for part in _parts(task, count)) for row in table.rows)
    return replace(table, rows=rows, num_slices=count)


def check_takes_slices(name: str) -> None:
    """Raises ScheduleError, which lists those that do, where a schedule of that name takes no slices."""
    if name in WITHOUT_SLICES:
        raise ScheduleError(
            f"schedule {name} takes no slices of tokens",
            cause="its updates follow single microbatches, or it has no backward pass",
            remedy=f"one of {_WITH}, or token_slices=None",
        )


def _parts(task: Task, count: int) -> tuple[Task, ...]:
    numbers = range(count) if task.kind == "forward" else reversed(range(count))
    return tuple(replace(task, slice=k) for k in numbers)


@dataclass(frozen=True)
class Slices:
    """A cut of a sequence.

    Args:
        lengths: tokens of each slice, from the first.
        seconds: time in which all slices pass through the pipeline.
    """

    lengths: tuple[int, ...]
    seconds: float


def pass_seconds(lengths: tuple[int, ...], stages: float, seconds: Callable[[int, int], float]) -> float:
    """Seconds in which slices of these lengths pass through the stages: t_1 + ... + t_M + (K - 1) max t_j.

    Args:
        lengths: tokens of each slice.
        stages: K, the number of stages.
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
    """The slices that pass through the stages in the least time, in multiples of ``unit`` tokens (TeraPipe, 2021).

    Args:
        tokens: of the sequence.
        stages: K, their number; 1 + (K - 1) / m where m sequences follow each other.
        seconds: t(tokens of a slice, tokens before it) of one stage; positive.
        unit: what lengths are multiples of; divides ``tokens``.
        tolerance_s: candidates for the longest slice that are closer than this are taken for one; the time is then
            within ``stages * tolerance_s`` of the least.

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
