"""The loop of the search: best first, closed by relaxations, corrected by what plans take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.plan.alternatives import outcome_text
from autopar.plan.trail import BOUNDED, IMPOSSIBLE, LEFT_OUT, PLANNED, TOO_LARGE
from autopar.search.loop import Expansion, Known, OpenRegion, Relaxation, explored
from autopar.search.outcome import Bounded, LeftOut
from autopar.search.policy import SearchPolicy
from autopar.search.trail import Region, Trail
from autopar.solver.meter import Meter, Work

BOUND, ESTIMATE = (
    Relaxation("a bound"),
    Relaxation("an estimate", 0.1),
)


@dataclass
class _Problem:
    """As much of a problem as the loop asks for."""

    policy: SearchPolicy = field(default_factory=SearchPolicy)
    trail: Trail = field(default_factory=Trail)
    meter: Meter = field(default_factory=Meter)
    memory_limit_bytes: int = 100
    offered: list[Any] = field(default_factory=list)

    def offer(self, plan: Any) -> None:
        self.offered.append(plan)

    def checkpoint(self) -> None:
        pass

    def spend(self) -> None:
        pass


def fastest(problem: Any, regions: Sequence[OpenRegion]) -> Any:
    return explored(problem, regions).best


def _plan(seconds: float, stages: int = 2) -> Any:
    return SimpleNamespace(step_time=seconds, num_stages=stages)


def _leaf(
    name: str,
    least_s: float,
    answer: Any,
    planned: list[str] | None = None,
    relaxation: Relaxation | None = BOUND,
    **options: Any,
) -> OpenRegion:
    def expand(known: Known) -> Expansion | Bounded:
        if planned is not None:
            planned.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Bounded) else Expansion(_plan(answer))

    return OpenRegion(Region("pipeline", how=name), expand, relaxation, least_s, least_s, **options)


def _branch(name: str, least_s: float, parts: Sequence[OpenRegion]) -> OpenRegion:
    return OpenRegion(
        Region("pipeline", how=name), lambda known: Expansion(regions=tuple(parts)), BOUND, least_s, least_s
    )


def _outcomes(problem: _Problem) -> dict[str, str]:
    return {row.how: row.outcome for row in problem.trail.rows if row.outcome != PLANNED}


def test_the_region_of_the_least_seconds_is_expanded_first_and_others_are_closed_by_theirs() -> None:
    problem, planned = _Problem(), list[str]()
    some = [_leaf("slow", 3.0, 4.0, planned), _leaf("fast", 1.0, 2.0, planned), _leaf("near", 1.5, 1.8, planned)]
    assert fastest(problem, some).step_time == 1.8
    assert planned == ["fast", "near"]
    assert _outcomes(problem) == {"slow": BOUNDED}


def test_of_regions_that_a_gap_does_not_tell_apart_that_of_fewest_stages_is_first() -> None:
    for times, first in ((1.005, "two"), (1.02, "four")):
        planned = list[str]()
        four, two = _leaf("four", 1.0, 2.0, planned), _leaf("two", times, 2.0, planned)
        numbered = [replace(r, region=replace(r.region, stages=((n, n),))) for r, n in ((four, 4), (two, 2))]
        fastest(_Problem(), numbered)
        assert planned[0] == first


def test_the_trail_has_what_was_expected_of_a_plan() -> None:
    problem = _Problem()
    fastest(problem, [_leaf("one", 1.0, 2.0, relaxation=ESTIMATE), _leaf("unknown", 0.0, 3.0, relaxation=None)])
    (row,) = [row for row in problem.trail.rows if row.outcome == PLANNED]
    assert (row.how, row.seconds, row.estimate_s, row.why) == ("one", 2.0, 1.0, "an estimate")
    assert outcome_text(row, 2.0) == "planned: 2 s, 1 s expected by an estimate"


def test_a_plan_of_a_region_of_several_numbers_of_stages_says_nothing_of_the_others() -> None:
    problem, leaf = _Problem(), _leaf("some", 1.0, 2.0, relaxation=ESTIMATE)
    fastest(problem, [replace(leaf, region=replace(leaf.region, stages=((2, 8),)))])
    (row,) = problem.trail.rows
    assert (row.stages, row.seconds) == (((2, 2),), 2.0) and problem.trail.covered() == {2}


def test_what_saves_less_than_the_gap_is_closed() -> None:
    planned = list[str]()
    some = [
        _leaf("first", 1.0, 2.0, planned),
        _leaf("hardly", 1.99, 1.99, planned),
        _leaf("enough", 1.97, 1.97, planned),
    ]
    assert fastest(_Problem(), some).step_time == 1.97
    assert planned == ["first", "enough"]


def test_estimates_are_corrected_by_what_plans_take() -> None:
    """The first takes twice its estimate: another is planned only where it may take less by more than the spread."""
    for estimate_s, is_planned in ((1.08, True), (1.12, False)):
        planned = list[str]()
        other = _leaf("other", estimate_s, 5.0, planned, ESTIMATE)
        fastest(_Problem(), [_leaf("first", 1.0, 2.0, planned, ESTIMATE), replace(other, least_s=0.0)])
        assert ("other" in planned) is is_planned


@pytest.mark.parametrize("of_other", [ESTIMATE, Relaxation("another estimate", like=ESTIMATE.name)])
def test_what_takes_long_to_plan_must_save_more(of_other: Relaxation) -> None:
    """The first takes all of the work: another must save 30% of the step by its estimate, less a spread of a half.

    The work of a relaxation that has none of its own is taken to be that of the one that it is like.
    """
    for times, is_planned in ((1.3, True), (1.5, False)):
        problem, planned = _Problem(), list[str]()

        def work(known: Known, problem: _Problem = problem) -> Expansion | Bounded:
            problem.meter.add(Work.TRACED, 10**6)
            return Expansion(_plan(1.0))

        first = OpenRegion(Region("pipeline"), work, ESTIMATE, 0.0, 0.01)
        other = replace(_leaf("other", times * 0.01, 5.0, planned), least_s=0.0)
        half = replace(of_other, spread=0.5)
        fastest(problem, [first, replace(other, relaxation=half)])
        assert ("other" in planned) is is_planned


def test_the_work_of_a_region_without_a_relaxation_is_no_price_of_others() -> None:
    known = Known().worked(_leaf("first", 0.0, 1.0, relaxation=None), 10**9)
    assert known.work(ESTIMATE) == 0
    assert known.worked(_leaf("second", 0.0, 1.0, relaxation=ESTIMATE), 7).work(ESTIMATE) == 7


def test_a_region_of_which_nothing_is_known_is_expanded_at_once() -> None:
    planned = list[str]()
    fastest(_Problem(), [_leaf("bounded", 0.5, 2.0, planned), _leaf("unknown", 0.0, 1.0, planned, None)])
    assert planned[0] == "unknown"


def test_a_last_resort_is_planned_only_without_a_plan_and_says_why_not() -> None:
    why = LeftOut("it would leave out what is printed")
    for first, is_planned in ((1.0, False), (InfeasiblePlanError("too large"), True)):
        problem, planned = _Problem(), list[str]()
        resort = _leaf("resort", 0.1, 3.0, planned, only_without=why)
        fastest(problem, [resort, _leaf("first", 0.5, first, planned)])
        assert ("resort" in planned) is is_planned
        assert (_outcomes(problem).get("resort") == LEFT_OUT) is not is_planned


def test_failures_are_told_and_the_first_of_one_stage_is_the_error() -> None:
    one = OpenRegion(Region("one stage"), _raises(InfeasiblePlanError("one", least_bytes=130)), BOUND, 2.0, 2.0)
    problem = _Problem()
    with pytest.raises(InfeasiblePlanError, match="one"):
        fastest(problem, [_leaf("several", 1.0, MicrobatchError("several")), one])
    assert [(row.outcome, row.missing_bytes) for row in problem.trail.rows] == [(IMPOSSIBLE, None), (TOO_LARGE, 30)]


def _raises(error: Exception) -> Callable[[Known], Expansion | Bounded]:
    def expand(known: Known) -> Expansion | Bounded:
        raise error

    return expand


def test_several_stages_must_save_a_share_of_a_step_of_one() -> None:
    gain = SearchPolicy().effort.least_gain
    one = OpenRegion(Region("one stage"), lambda known: Expansion(_plan(1.0, 1)))
    for seconds, stages in ((1 - gain / 2, 1), (1 - 2 * gain, 2)):
        problem = _Problem(replace(SearchPolicy(), effort=replace(SearchPolicy().effort, gap=0.0)))
        assert fastest(problem, [one, _leaf("several", 0.1, seconds)]).num_stages == stages


@pytest.mark.parametrize("seed", range(30))
def test_with_true_bounds_and_no_gap_the_answer_is_that_of_brute_force(seed: int) -> None:
    """Drawn trees of regions: a bound of a region is at most the least of its parts."""
    random = np.random.default_rng(seed)
    leaves = list[float]()

    def drawn(depth: int) -> OpenRegion:
        if depth == 0 or random.random() < 0.3:
            seconds = float(random.uniform(1, 2))
            leaves.append(seconds)
            return _leaf("leaf", seconds * float(random.uniform(0.5, 1)), seconds)
        parts = [drawn(depth - 1) for _ in range(random.integers(1, 4))]
        return _branch("branch", min(p.least_s for p in parts) * float(random.uniform(0.5, 1)), parts)

    policy = replace(SearchPolicy(), effort=replace(SearchPolicy().effort, gap=0.0))
    problem = _Problem(policy)
    assert fastest(problem, [drawn(4)]).step_time == min(leaves)
    assert all(row.least_s >= min(leaves) for row in problem.trail.rows if row.least_s is not None)


def test_other_plans_of_several_stages_are_kept_for_the_record() -> None:
    one = OpenRegion(Region("one stage"), lambda known: Expansion(_plan(9.0, 1)))
    known = explored(_Problem(), [one, _leaf("slow", 1.0, 5.0), _leaf("fast", 2.0, 3.0), _leaf("slower", 2.5, 4.0)])
    assert known.best is not None and known.best.step_time == 3.0
    assert sorted(plan.step_time for plan in known.others) == [4.0, 5.0]


def test_nothing_is_known_of_an_empty_search() -> None:
    assert Known().best_s == math.inf and Known().ratio(BOUND) == 0.0


def test_a_relaxation_has_the_ratio_of_another_until_it_has_its_own() -> None:
    known = Known(ratios={"a": 1.5, "b": 1.2})
    assert known.ratio(Relaxation("a", 0.1, "b")) == 1.5
    assert known.ratio(Relaxation("c", 0.1, "b")) == 1.2
    assert known.ratio(Relaxation("c", 0.1)) == 0.0
