"""The search: branch and bound over regions of the whole decision, with a ladder of relaxations.

Variables: the region (one stage, so many stages, so many microbatches, ...) that is planned. Objective: the least
seconds of a step. Constraints: those of each plan. `explored` is where a caller starts:

    while regions are open:
        the one of the least expected seconds
            is closed, where its relaxation says that it cannot be faster than the best plan by more than a gap,
            else is expanded: into regions with sharper relaxations or fewer plans, into a plan, or into nothing.

A relaxation of a region says two numbers: seconds that no plan of it is below, or is taken not to be below
(``least_s``), and seconds that its best plan is expected to take. The second is corrected by the plans of the same
search: plans have taken at least ``ratio`` times what the relaxation said of their regions, so that others are
closed where ``1 - spread`` of that is no faster, or saves less than is worth the work that such a region took. Before
there is such a plan the ratio is taken to be 1, and the spread counts while little is spent (`EffortPolicy.spent`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.plan import Plan
from autopar.search.clock import units_of
from autopar.search.outcome import Bounded, NoRoomError, Outcome, Planned
from autopar.search.policy import EffortPolicy
from autopar.search.problem import Problem
from autopar.search.trail import Region, outcome_of


@dataclass(frozen=True)
class Relaxation:
    """A way to say in less time than planning takes how fast the plans of a region may be.

    Args:
        name: in words.
        spread: share by which plans of one search differ in how many times its seconds they take; None for a bound,
            which closes regions by itself alone.
        like: name of another whose plans say how far it is off, and what they cost, before it has a plan of its own; ""
            where none does.
    """

    name: str
    spread: float | None = None
    like: str = ""

    def usual(self, effort: EffortPolicy) -> float:
        """Times its seconds that the best plan of a region takes, before a plan says how many."""
        return effort.bound_ratio if self.spread is None else 1.0

    def off(self, ratio: float, effort: EffortPolicy, work: int) -> float:
        """Share by which it may be off; without a plan of such a region for as long as a plan costs little.

        Args:
            ratio: that of plans; 0 before there is one.
            effort: of the search.
            work: units that were spent.
        """
        if self.spread is None:
            return 1.0
        return self.spread if ratio else self.spread * (1 - effort.spent(work))


@dataclass(frozen=True)
class OpenRegion:
    """A region that is not closed yet.

    Args:
        region: for the trail.
        expand: plans the region, or divides it into smaller ones. Its errors close the region.
        relaxation: source of its seconds; None before there is one, when it is expanded first.
        least_s: seconds of a step that no plan of it is taken to be below.
        expected_s: seconds of a step that its best plan is expected to take, if relaxations were right.
        only_without: closes it once there is any plan; None where it competes.
        is_silent: whether the trail has no row of it: rows of others have all its plans.
    """

    region: Region
    expand: Callable[[Known], Expansion | Bounded]
    relaxation: Relaxation | None = None
    least_s: float = 0.0
    expected_s: float = 0.0
    only_without: Outcome | None = None
    is_silent: bool = False

    @property
    def is_pipeline(self) -> bool:
        """Whether its plans have several stages."""
        return self.region.form != "one stage"

    def rank(self, known: Known, effort: EffortPolicy) -> float:
        """Seconds by which regions are taken up, the least first.

        Args:
            known: what was planned.
            effort: says how much longer than a bound plans take.
        """
        if self.only_without is not None and not self.is_silent:
            return math.inf
        if self.relaxation is None:
            return -math.inf
        return max(self.relaxation.usual(effort), known.ratio(self.relaxation)) * self.expected_s

    def closed(self, known: Known, effort: EffortPolicy, work: int) -> Outcome | None:
        """Why it need not be planned; None where it may have a faster plan.

        Args:
            known: what was planned.
            effort: share of the best plan's step that one must be able to save, and what relaxations are worth.
            work: units that were spent.
        """
        if known.best is None:
            return None
        if self.only_without is not None:
            return self.only_without
        if self.relaxation is None:
            return None
        ratio = known.ratio(self.relaxation)
        off = self.relaxation.off(ratio, effort, work)
        gap, expected_s = effort.gap_after(work), (1 - off) * (ratio or 1.0) * self.expected_s
        longer = known.work(self.relaxation) / max(1, work)
        if self.least_s >= (1 - gap) * known.best_s or expected_s >= (1 - gap - effort.price * longer) * known.best_s:
            return Bounded(self.relaxation.name, max(self.least_s, expected_s))
        return None


@dataclass(frozen=True)
class Expansion:
    """Result of expanding a region.

    Args:
        plan: the fastest of its plans that was planned; None where it only branched.
        regions: those of its plans that are open still.
    """

    plan: Plan | None = None
    regions: tuple[OpenRegion, ...] = ()


@dataclass(frozen=True)
class Known:
    """State of a search: the best plans so far, and how far relaxations were off.

    Args:
        best: the fastest plan; None before there is one.
        one_stage: the last plan of one stage; None before there is one.
        failures: why regions have no plan, those of one stage first.
        ratios: by name of a relaxation the least ratio of a plan's seconds to those that it estimated.
        others: plans of several stages that are not the best.
        works: by name of a relaxation the most work units that planning a region of it took.
    """

    best: Plan | None = None
    one_stage: Plan | None = None
    failures: tuple[InfeasiblePlanError | MicrobatchError, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    others: tuple[Plan, ...] = ()
    works: Mapping[str, int] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        """Seconds that a plan must stay below to be of use."""
        return math.inf if self.best is None else self.best.step_time

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the axes of the mesh of the last plan of one stage; empty before there is one."""
        return () if self.one_stage is None else tuple(n for _, n in self.one_stage.stages[0].mesh_axes)

    def ratio(self, relaxation: Relaxation) -> float:
        """Least ratio of a plan's seconds to those that the relaxation estimated; 0 before there is one."""
        return self.ratios.get(relaxation.name, self.ratios.get(relaxation.like, 0.0))

    def work(self, relaxation: Relaxation) -> int:
        """Most work units that planning a region of the relaxation took, or of one like it; 0 before there is one."""
        return self.works.get(relaxation.name, self.works.get(relaxation.like, 0))

    def planned(self, region: OpenRegion, plan: Plan, least_gain: float) -> Known:
        """The state after a region was planned.

        Args:
            region: of the plan.
            plan: what was planned.
            least_gain: share of the seconds of a plan of one stage that pipelines must save to be taken.
        """
        gains = region.is_pipeline and self.best is not None and self.best.num_stages == 1
        best = plan if self.best is None or plan.step_time < self.best_s * (1 - gains * least_gain) else self.best
        ratios = self._with_ratio(region, plan.step_time)
        one_stage = self.one_stage if region.is_pipeline else plan
        beaten = self.best if best is plan else plan
        others = self.others if beaten is None or beaten.num_stages == 1 else (*self.others, beaten)
        return replace(self, best=best, one_stage=one_stage, ratios=ratios, others=others)

    def bounded(self, region: OpenRegion, answer: Bounded) -> Known:
        """The state after a bound or an estimate closed a region."""
        return self if answer.least_s is None else replace(self, ratios=self._with_ratio(region, answer.least_s))

    def worked(self, region: OpenRegion, work: int) -> Known:
        """The state with the work units that planning a region took."""
        if region.relaxation is None:
            return self
        name = region.relaxation.name
        return replace(self, works={**self.works, name: max(work, self.works.get(name, 0))})

    def _with_ratio(self, region: OpenRegion, seconds: float) -> Mapping[str, float]:
        """The ratios, with that of a region whose plans take so many seconds at least."""
        if region.relaxation is None or region.expected_s <= 0:
            return self.ratios
        name, ratio = region.relaxation.name, seconds / region.expected_s
        return {**self.ratios, name: min(ratio, self.ratios.get(name, ratio))}

    def failed(self, region: OpenRegion, error: InfeasiblePlanError | MicrobatchError) -> Known:
        """The state after a region was found to have no plan."""
        failures = (*self.failures, error) if region.is_pipeline else (error, *self.failures)
        return replace(self, failures=failures)


def _tell_estimate(problem: Problem, region: OpenRegion, plan: Plan) -> None:
    """Tells the trail what a relaxation expected of a region that has a plan now, of so many stages as it said.

    Of other numbers of stages in the region the plan says nothing.
    """
    of, number = region.region, plan.num_stages
    has = not of.stages or any(first <= number <= last for first, last in of.stages)
    if region.relaxation is not None and region.expected_s > 0 and has:
        expected = Planned(plan.step_time, region.expected_s, region.relaxation.name)
        problem.trail.close(replace(of, stages=((number, number),)) if of.stages else of, expected)


def _tell_work(problem: Problem, region: OpenRegion, before: int, of_rows: int) -> None:
    """Tells the trail the work units that expanding a region took, without those of rows that it led to.

    Args:
        problem: what is planned.
        region: that was expanded.
        before: units of the search before it.
        of_rows: units of the trail before it.
    """
    took = units_of(problem.meter) - before
    problem.trail.worked(region.region, took - (problem.trail.work - of_rows))


def _next(left: Sequence[OpenRegion], known: Known, effort: EffortPolicy, work: int) -> OpenRegion:
    """The open region of the least expected seconds; of those that a gap does not tell apart, that of fewest stages.

    More stages hold more microbatches in flight, which expected seconds do not say.
    """
    gap = effort.gap_after(work)
    ranks = [region.rank(known, effort) for region in left]
    least = min(ranks)
    if not 0 < least < math.inf:
        return left[ranks.index(least)]  # nothing is expected of it yet, or of any
    near = [region for region, rank in zip(left, ranks, strict=True) if rank <= (1 + gap) * least]
    return min(near, key=lambda region: max((last for _, last in region.region.stages), default=0))


#: Everything that may be planned.
Regions: TypeAlias = Sequence[OpenRegion]


def explored(problem: Problem, regions: Regions) -> Known:
    """Plans regions, that of the least estimate first, until no open one may have a faster plan.

    Returns the state at the end, which has a best plan.

    Args:
        problem: what is planned: its policy says when to stop, and its trail is told of every region that is closed.
        regions: of the first of equal rank.

    Raises:
        InfeasiblePlanError: nothing fits the memory; the error is that of one stage where one was tried.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    known, left = Known(), list(regions)
    while left:
        before = units_of(problem.meter)
        region = _next(left, known, problem.policy.effort, before)
        left.remove(region)
        closed = region.closed(known, problem.policy.effort, before)
        if closed is not None:
            if not region.is_silent:
                problem.trail.close(region.region, closed)
            continue
        of_rows = problem.trail.work
        try:
            answer = region.expand(known)
        except (InfeasiblePlanError, MicrobatchError) as error:
            _tell_work(problem, region, before, of_rows)
            problem.trail.close(region.region, outcome_of(error, problem.memory_limit_bytes))
            known = known.failed(region, error)
            continue
        _tell_work(problem, region, before, of_rows)
        if isinstance(answer, Bounded):
            problem.trail.close(region.region, answer)
            known = known.bounded(region, answer).worked(region, units_of(problem.meter) - before)
            continue
        left[:0] = answer.regions
        if answer.plan is not None:
            _tell_estimate(problem, region, answer.plan)
            known = known.planned(region, answer.plan, problem.policy.effort.least_gain)
            known = known.worked(region, units_of(problem.meter) - before)
            problem.offer(known.best or answer.plan)
        problem.checkpoint()
        if left:
            problem.spend()
    if known.best is None:
        failure = known.failures[0]
        raise (failure.for_users() if isinstance(failure, NoRoomError) else failure) from None
    return known
