"""All decisions together against exhaustive search: sharding, meshes, stages, submeshes, microbatches, recomputation.

Where the number of stages is free the planner takes the best of the ways of one stage, and of pipelines where there are
several nodes or one stage does not fit. It is not exact where a pipeline is faster on one node. Where memory binds in
every number of microbatches nothing is computed anew unless it must be. Where stages are asked for it is not exact for
reasons that the documentation names ("Exact and not"): slicings are compared by estimates of the dynamic program, which
knows neither what a cut makes of the backward pass nor how sends overlap, one slicing is planned for each number of
stages and microbatches if it fits, and a schedule that saves less than 0.5% is not taken. How often and how far that is
off was measured on 200 problems, and is asserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.search.joint.cases import case

#: Of 200 cases those that take a second or two, where something fits and the planner was found to be exact.
QUICK = (4, 10, 17, 19, 25, 28, 43, 45, 48, 49, 53, 70, 77, 79, 84, 87, 89, 98, 111, 122, 132, 52, 143, 164, 178)

#: Rounding of sums in another order.
EQUAL = 1e-9

CASES = 200

#: Least share in which the planner is exact, and largest ratio, with the number of stages free and with it asked for;
#: most cases in which it finds nothing where something fits.
FREE_EXACT, FREE_WORST = 0.8, 6.0
ASKED_EXACT, ASKED_WORST = 0.55, 1.8
MISSED = 0


@dataclass(frozen=True)
class Compared:
    """Seconds of what was planned over those of the fastest way; nan where nothing fits, inf where only nothing was
    planned. Among ways of equal costs the planner may take one whose conversions are fewer: then it is less than 1."""

    number: int
    free: bool
    ratio: float

    @property
    def exact(self) -> bool:
        """Whether the planner did as well, or both say that nothing fits."""
        return math.isnan(self.ratio) or self.ratio <= 1 + EQUAL


def compared(number: int) -> Compared:
    """Plans and enumerates a case."""
    made = case(number)
    limit = made.limit_bytes()
    plan, best = made.planned(limit), made.space(limit).best()
    if best is None:
        assert plan is None, f"case {number}: the plan is none of the ways: {plan}"
        return Compared(number, made.asked.stages is None, math.nan)
    if plan is None:
        return Compared(number, made.asked.stages is None, math.inf)
    assert plan.peak_memory <= limit
    return Compared(number, made.asked.stages is None, plan.step_time / best.seconds)


@pytest.mark.parametrize("number", QUICK)
def test_the_plan_is_that_of_exhaustive_search(number):
    found = compared(number)
    assert not math.isnan(found.ratio), "a way fits"
    assert found.ratio == pytest.approx(1.0, rel=EQUAL)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_how_often_and_how_far_plans_are_off():
    found = [compared(n) for n in range(CASES)]
    told = "\n".join(f"{c.number} {'free' if c.free else 'asked'} {c.ratio:.6f}" for c in found if not c.exact)
    free, asked = [c for c in found if c.free], [c for c in found if not c.free]
    assert share(free) >= FREE_EXACT, told
    assert share(asked) >= ASKED_EXACT, told
    assert worst(free) <= FREE_WORST, told
    assert worst(asked) <= ASKED_WORST, told
    assert sum(math.isinf(c.ratio) for c in free) == 0, told
    assert sum(math.isinf(c.ratio) for c in asked) <= MISSED, told


def share(cases: Sequence[Compared]) -> float:
    """Share of those where something fits in which the planner is exact."""
    fitting = [c for c in cases if not math.isnan(c.ratio)]
    return sum(c.exact for c in fitting) / len(fitting)


def worst(cases: Sequence[Compared]) -> float:
    """Largest ratio."""
    return max(c.ratio for c in cases if math.isfinite(c.ratio))
