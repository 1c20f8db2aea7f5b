"""Relaxed pipelines: plans by the relaxation of each kind of stage, which say what is planned exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from autopar.errors import InfeasiblePlanError, ScheduleError
from autopar.plan import Plan, PlanContent
from autopar.search.mesh_bounds import with_relaxation_only
from autopar.search.outcome import Bounded, NoRoomError
from autopar.search.pipeline.candidates import Candidate, CuttableStep, in_other_microbatches
from autopar.search.pipeline.plan_candidate import plan_candidate


def relaxed_pipeline(
    step: CuttableStep, candidate: Candidate, *, any_that_fits: bool = False, cutoff_s: float = math.inf
) -> Plan | None:
    """The plan of a candidate by the relaxation of each kind of stage; None where it is no faster, or cannot run.

    Args:
        step: the whole.
        candidate: stages and their devices.
        any_that_fits: whether no other level of recomputation is relaxed once one fits.
        cutoff_s: seconds from which the plan is of no use: once the stages that are relaxed take as long by an
            estimate, no other is.

    Raises:
        InfeasiblePlanError: no relaxation finds what fits. It is a `NoRoomError` where no plan does.
    """
    hasty = with_relaxation_only(step.problem, any_that_fits=any_that_fits)
    try:
        relaxed = replace(candidate, shares_plans=True)
        plan = plan_candidate(replace(step, problem=hasty), relaxed, cutoff_s=cutoff_s)
    except ScheduleError:
        return None
    if isinstance(plan, Bounded):
        return None
    record = msgspec.structs.replace(plan.content.search, strategy="relaxed")
    return replace(plan, content=msgspec.structs.replace(plan.content, search=record))


@dataclass(frozen=True)
class RelaxedPipelines:
    """Plans of candidates by relaxations, which say which of them is planned exactly.

    Args:
        step: the whole.
        plans: with what they are of, in the order in which they were made.
        tried: candidates that were relaxed.
        unfit: of these, those of which none was found that fits, with why.
        without_room: those that no exact plan has room for either, with why.
    """

    step: CuttableStep
    plans: list[tuple[Plan, Candidate]] = field(default_factory=list)
    tried: list[Candidate] = field(default_factory=list)
    unfit: dict[Candidate, InfeasiblePlanError] = field(default_factory=dict)
    without_room: dict[Candidate, NoRoomError] = field(default_factory=dict)

    def fastest(self) -> tuple[Plan, Candidate] | None:
        """The fastest with what it is of; None where there is none."""
        return min(self.plans, key=lambda planned: planned[0].step_time, default=None)

    def add(self, some: Iterable[Candidate], least_gain: float = 0.0) -> None:
        """Relaxes candidates, each as long as it may be faster than those before.

        Args:
            some: candidates.
            least_gain: share of the seconds of the fastest that one must save to be kept.
        """
        for candidate in some:
            if candidate in self.tried or any(other == candidate for _, other in self.plans):
                continue
            self.step.problem.checkpoint()
            self.step.problem.spend()
            self.tried.append(candidate)
            cutoff_s = (1 - least_gain) * min((plan.step_time for plan, _ in self.plans), default=math.inf)
            try:
                plan = relaxed_pipeline(self.step, candidate, cutoff_s=cutoff_s)
            except NoRoomError as error:
                self.without_room[candidate] = error
                continue
            except InfeasiblePlanError as error:
                self.unfit[candidate] = error
                continue
            if plan is not None and (not least_gain or plan.step_time < cutoff_s):
                self.plans.append((plan, candidate))

    def climb(self) -> None:
        """Relaxes the slicing of the fastest in half or in twice the microbatches, and so on while that is faster.

        Nothing where their number is asked for.
        """
        if self.step.problem.job.num_microbatches is not None:
            return
        before, least_gain = None, self.step.problem.policy.effort.least_gain
        while (best := self.fastest()) is not None and best is not before:
            before = best
            for candidate in in_other_microbatches(self.step.problem, self.step.source, best[1]):
                if may_gain(*best, candidate.count, self._steps(best[1]), least_gain):
                    self.add([candidate])
                if self.fastest() is not best:
                    break  # the other way lies what is slower still

    def _steps(self, candidate: Candidate) -> dict[int, Plan]:
        """Plans of the slicing of a candidate, by number of microbatches."""
        return {c.count: plan for plan, c in self.plans if replace(c, count=candidate.count) == candidate}


def may_gain(plan: Plan, candidate: Candidate, count: int, known: dict[int, Plan], least_gain: float) -> bool:
    """Whether a slicing may be faster in another number of microbatches, by what is known of it in others.

    In m microbatches S stages take T(m) = t(m) (1 + (S - 1) / m), where t, the seconds of the slowest stage, is taken
    to be affine in m: what it computes, and what starts and messages take in every microbatch. Fewer of them hold
    more, so that t is longer there where memory is short. More gain the bubble, and what the memory limit costs.

    Args:
        plan: the fastest.
        candidate: what it is of.
        count: the other number of microbatches.
        known: by their number, plans of the slicing.
        least_gain: share of a step that has to be saved.
    """
    stages, here = len(candidate.members), candidate.count

    def bubble(m: int) -> float:
        return 1.0 + (stages - 1) / m

    step_s = plan.step_time
    others = [m for m in known if (m - here) * (count - here) < 0]
    if count < here and not others:  # fewer hold more, and were ranked below these without a limit
        return not any(part.memory_bound for part in plan.content.parts)
    t_s = other_s = step_s / bubble(here)
    if others:
        near = min(others, key=lambda m: abs(m - here))
        rise_s = (known[near].step_time / bubble(near) - t_s) * (count - here) / (near - here)
        other_s += rise_s if count < here else max(0.0, rise_s)
    saved_s = limit_cost(plan) * t_s if count > here else 0.0
    return (other_s - saved_s) * bubble(count) < step_s * (1 - least_gain)


def limit_cost(plan: Plan) -> float:
    """Share of its seconds that the memory limit costs some stage of a pipeline at most, recomputation included."""
    return max(map(_cost_of, plan.content.parts), default=0.0)


def _cost_of(content: PlanContent) -> float:
    search = content.search
    if not content.memory_bound:
        return 0.0
    if content.stages[0].form.remat != "none" or search.unlimited_s is None or not search.objective:
        return 1.0  # the first relaxation has none without the limit
    return max(0.0, 1.0 - search.unlimited_s / search.objective)
