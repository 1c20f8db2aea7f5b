"""Cost and memory of a choice, straight from the problem's definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import Array, ChoiceProblem, Usage

#: A choice fits where its peak is at most ``limit * (1 + FIT_TOLERANCE)``: room for the rounding of sums only.
FIT_TOLERANCE = 1e-12


def objective(problem: ChoiceProblem, choice: Sequence[int]) -> float:
    """Cost of ``choice`` in the problem's unit, summed without rounding in between; inf where forbidden."""
    terms = [float(node.costs[k]) for node, k in zip(problem.nodes, choice, strict=True)]
    terms += [float(edge.costs[choice[edge.source], choice[edge.target]]) for edge in problem.edges]
    return math.inf if math.inf in terms else math.fsum(terms)


def usage_profile(problem: ChoiceProblem, choice: Sequence[int]) -> tuple[NDArray[np.int64], Array]:
    """Memory over time under ``choice``.

    Returns:
        times (increasing) and bytes: ``bytes[i]`` is held from ``times[i]`` until ``times[i + 1]``; nothing is
        held before the first and from the last on.
    """
    return profile(problem.usages, [float(u.bytes[choice[u.node]]) for u in problem.usages])


def profile(usages: Sequence[Usage], used: Sequence[float]) -> tuple[NDArray[np.int64], Array]:
    """Memory over time, as `usage_profile` returns it.

    Args:
        usages: when bytes are held.
        used: by usage its bytes.
    """
    live = [(u.start, u.stop) for u in usages if u.stop > u.start]
    starts, stops = np.array(live, dtype=np.int64).reshape(-1, 2).T
    held = np.array([n for u, n in zip(usages, used, strict=True) if u.stop > u.start], dtype=np.float64)
    times = np.unique(np.concatenate([starts, stops]))
    change = np.zeros(times.size)
    np.add.at(change, np.searchsorted(times, starts), held)
    np.subtract.at(change, np.searchsorted(times, stops), held)
    return times, np.maximum(np.cumsum(change), 0.0)


def peak_bytes(problem: ChoiceProblem, choice: Sequence[int]) -> float:
    """Most bytes that ``choice`` holds at any time; 0 without usages."""
    return float(usage_profile(problem, choice)[1].max(initial=0.0))


def within(used_bytes: float, limit_bytes: float | None) -> bool:
    """Whether ``used_bytes`` obey the limit, up to the rounding of sums."""
    return limit_bytes is None or used_bytes <= limit_bytes + abs(limit_bytes) * FIT_TOLERANCE


def fits(problem: ChoiceProblem, choice: Sequence[int]) -> bool:
    """Whether ``choice`` obeys the memory limit at every time."""
    return problem.limit_bytes is None or within(peak_bytes(problem, choice), problem.limit_bytes)


def is_feasible(problem: ChoiceProblem, choice: Sequence[int]) -> bool:
    """Whether ``choice`` has the right length and range, costs less than inf and fits."""
    if len(choice) != len(problem.nodes):
        return False
    if not all(0 <= k < node.costs.size for node, k in zip(problem.nodes, choice, strict=True)):
        return False
    return math.isfinite(objective(problem, choice)) and fits(problem, choice)


def maximal_times(usages: Sequence[Usage]) -> tuple[int, ...]:
    """Times at which the set of live usages is in no other time's set, in order.

    Usages are intervals, so these are the times after some start and right before the next stop
    (the maximal cliques of an interval graph); a limit that holds at them holds always.
    """
    live = [u for u in usages if u.stop > u.start]
    events = sorted({(u.start, 1) for u in live} | {(u.stop, 0) for u in live})
    times = []
    for (time, kind), (_, after) in itertools.pairwise(events):
        if kind == 1 and after == 0:
            times.append(time)
    return tuple(times)
