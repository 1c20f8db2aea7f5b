"""All decisions together against exhaustive search: sharding, meshes, stages, submeshes, microbatches, recomputation.

The steps are tiny, so every slicing of them is planned, and every way of one stage where memory binds. It is not exact
by what a pipeline must save where one stage does, and by what a schedule other than 1F1B must save.

Larger steps are sliced by estimates of the dynamic program, which knows neither what a cut makes of the backward pass
nor how sends overlap, and take the fewest microbatches that fit with one stage. How often and how far that is off is
measured on the same problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from autopar.search.policy import SearchPolicy, SizePolicy
from tests.search.joint.cases import DEFAULT, Case, case
from tests.versions import tolerance

#: Of 200 cases those that take a second or two, where something fits and the planner was found to be exact.
QUICK = (4, 10, 17, 19, 25, 28, 43, 48, 49, 53, 70, 79, 84, 87, 89, 98, 111, 122, 52, 143, 164, 178)

#: Rounding of sums in another order.
EQUAL = 1e-9

CASES = 200

#: Those of them that take no longer and are exact as larger steps are planned too.
QUICK_BY_ESTIMATES = (17, 25, 49, 53, 79, 84, 89, 98, 111, 122, 178)


@dataclass(frozen=True)
class Expected:
    """Least share in which the planner is exact, and largest ratio, with stages free and asked for.

    ``missed`` is in how many cases at most it finds nothing though something fits.
    """

    free_share: float
    free_worst: float
    asked_share: float
    asked_worst: float
    missed: int


TINY = Expected(0.99, 1.01, 0.92, 1.02, 0)
BY_ESTIMATES = Expected(0.9, 1.5, 0.55, 1.8, 3)


@dataclass(frozen=True)
class Compared:
    """Seconds of what was planned over those of the fastest way.

    nan where nothing fits, inf where only nothing was planned. Among ways of equal costs the planner may take one whose
    conversions are fewer: then it is less than 1.
    """

    number: int
    free: bool
    ratio: float

    @property
    def exact(self) -> bool:
        """Whether the planner did as well, or both say that nothing fits."""
        return math.isnan(self.ratio) or self.ratio <= 1 + EQUAL


@dataclass(frozen=True)
class Enumerated:
    """A case with its fastest way, which does not depend on how it is planned."""

    made: Case
    limit_bytes: int
    best_s: float | None

    @staticmethod
    def of(number: int) -> Enumerated:
        """Enumerates a case."""
        made = case(number)
        limit = made.limit_bytes()
        best = made.space(limit).best()
        return Enumerated(made, limit, None if best is None else best.seconds)

    def compared(self, policy: SearchPolicy = DEFAULT) -> Compared:
        """Plans it."""
        plan, number = self.made.planned(self.limit_bytes, policy), self.made.number
        free = self.made.asked.stages is None
        if self.best_s is None:
            assert plan is None, f"case {number}: the plan is none of the ways: {plan}"
            return Compared(number, free, math.nan)
        if plan is None:
            return Compared(number, free, math.inf)
        assert plan.peak_memory <= self.limit_bytes
        assert plan.search.lower_bound is not None, "a bound is there, whatever was free"
        assert plan.search.lower_bound <= self.best_s * (1 + EQUAL), f"case {number}: the bound is above a way"
        return Compared(number, free, plan.step_time / self.best_s)


#: Plans tiny steps as larger ones are planned.
BY_ESTIMATES_ALONE = SearchPolicy(sizes=SizePolicy(tiny_operators=0))


@pytest.mark.few(4)
@pytest.mark.parametrize("number", QUICK)
def test_the_plan_is_that_of_exhaustive_search(number):
    found = Enumerated.of(number).compared()
    assert not math.isnan(found.ratio), "a way fits"
    assert found.ratio == pytest.approx(1.0, rel=EQUAL)


@pytest.mark.few(3)
@pytest.mark.parametrize("number", QUICK_BY_ESTIMATES)
def test_as_larger_steps_are_planned_it_is_often_the_same(number):
    found = Enumerated.of(number).compared(BY_ESTIMATES_ALONE)
    assert found.ratio == pytest.approx(1.0, rel=tolerance(0.01, EQUAL))


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_how_often_and_how_far_plans_are_off():
    cases = [Enumerated.of(n) for n in range(CASES)]
    check([c.compared() for c in cases], TINY)
    check([c.compared(BY_ESTIMATES_ALONE) for c in cases], BY_ESTIMATES)


def check(found: Sequence[Compared], expected: Expected) -> None:
    """Asserts what is expected."""
    told = "\n".join(f"{c.number} {'free' if c.free else 'asked'} {c.ratio:.6f}" for c in found if not c.exact)
    print(told)
    free, asked = [c for c in found if c.free], [c for c in found if not c.free]
    assert sum(math.isinf(c.ratio) for c in found) <= expected.missed, told
    assert share(free) >= expected.free_share, told
    assert share(asked) >= expected.asked_share, told
    assert worst(free) <= expected.free_worst, told
    assert worst(asked) <= expected.asked_worst, told


def share(cases: Sequence[Compared]) -> float:
    """Share of those where something fits in which the planner is exact."""
    fitting = [c for c in cases if not math.isnan(c.ratio)]
    return sum(c.exact for c in fitting) / len(fitting)


def worst(cases: Sequence[Compared]) -> float:
    """Largest ratio."""
    return max(c.ratio for c in cases if math.isfinite(c.ratio))
