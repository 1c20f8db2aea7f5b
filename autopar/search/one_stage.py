"""In how many microbatches one stage runs, and what it computes anew."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.plan import Plan
from autopar.recompute import LEVELS, Level
from autopar.search.attempts import Attempts


def one_stage(
    attempts: Attempts[Plan],
    counts: Sequence[int],
    remat: str,
    *,
    offload: bool,
    tiny: bool,
    cutoff_s: float = math.inf,
) -> Plan:
    """The plan of one stage.

    One microbatch is taken and nothing computed anew where that fits. Else the fewest microbatches are taken with which
    some plan does; where none does, as little is computed anew as must be. Of a tiny step, and where state may lie in
    host memory, all ways up to the first that the limit has no part in are compared, and the fastest is taken.

    Args:
        attempts: plans in a number of microbatches and with what is held.
        counts: numbers of microbatches, rising.
        remat: "auto", or what is computed anew.
        offload: whether state may lie in host memory.
        tiny: whether all ways may be tried.
        cutoff_s: seconds of a step that a plan must stay below to be of use. More microbatches and more work cost more
            time, so the first way that fits and does not stay below is the last.

    Raises:
        InfeasiblePlanError: no way fits, or none is found to stay below ``cutoff_s``.
        MicrobatchError: no number of microbatches is possible.
    """
    first: Level = "none" if remat == "auto" else next(level for level in LEVELS if level == remat)
    more = LEVELS[1:] if remat == "auto" else ()
    plain = [(count, first) for count in counts]
    if offload:
        ways = [*plain, *((count, level) for level in more for count in counts)]
        found = attempts.fastest(ways, _nothing_on_host, _seconds, cutoff_s)
    elif tiny:
        ways = [(count, level) for count in counts for level in (first, *more)]
        found = attempts.fastest(ways, _is_free_of_the_limit, _seconds, cutoff_s)
    else:
        found = attempts.first(plain, cutoff_s) or _recomputed(attempts, counts, more, cutoff_s)
    if found is None:
        raise attempts.error()
    return found


def _recomputed(
    attempts: Attempts[Plan], counts: Sequence[int], levels: Sequence[Level], cutoff_s: float
) -> Plan | None:
    """The plan that computes as little anew as must be. Where that which holds least does not fit, few of those between
    need to be tried: in one microbatch nothing is added up beside it."""
    possible = attempts.possible(counts)
    if not levels or not possible or attempts.not_faster is not None:
        return None
    found = attempts.first([(possible[-1], levels[-1])])
    if found is not None:
        between = [(count, level) for level in levels for count in possible]
        return attempts.first(between[:-1], cutoff_s) or found
    return attempts.first([(possible[0], level) for level in levels], cutoff_s) if len(possible) > 1 else None


def _nothing_on_host(plan: Plan) -> bool:
    return not plan.stages[0].host_bytes


def _is_free_of_the_limit(plan: Plan) -> bool:
    return plan.stages[0].remat == "none" and not plan.content.memory_bound


def _seconds(plan: Plan) -> float:
    return plan.step_time
