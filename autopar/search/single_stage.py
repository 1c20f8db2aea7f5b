"""`OneStagePlanner`: the best plan of one stage, in whatever microbatches, with whatever recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.plan import Plan, StepForm
from autopar.search.alpa import alpa
from autopar.search.anytime import Converted
from autopar.search.bound import Freedom, bounded
from autopar.search.cache import PlanCache, cached
from autopar.search.mesh_bounds import with_relaxation_only
from autopar.search.notes import meetings
from autopar.search.one_stage import (
    StageForms,
    first_configuration,
    in_blocks,
    one_stage,
    region_of,
    with_padding,
)
from autopar.search.outcome import Bounded
from autopar.search.pipeline.whole_steps import counts_that_may_fit
from autopar.search.problem import Problem
from autopar.search.registry import Strategy, names_plan
from autopar.search.source import FormedStep, StepSource
from autopar.search.techniques import (
    BACKWARD_UPDATE,
    BLOCKS,
    HOST_UPDATE,
    LAYERED_UPDATE,
    MICROBATCHES,
    PADDING,
    SEGMENTS,
    Asked,
)
from autopar.search.trials import Trials


@dataclass(frozen=True)
class OneStagePlanner:
    """Plans steps as one stage.

    Args:
        strategy: shards it.
        cache: plans that are kept; None keeps none.
    """

    strategy: Strategy
    cache: PlanCache | None = None

    def ample(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float
    ) -> Plan | Bounded:
        """The plan of one stage in the first configuration, where memory is ample; arguments as of `best`."""
        roomy = replace(problem, subproblem=replace(problem.subproblem, ample_memory=True))
        job, asked = problem.job, self._asked(problem, step, counts)
        blocks = next(iter(BLOCKS.options(asked)), 0)
        first = first_configuration(counts or [1], job.remat)
        if blocks and problem.request.attention == "blocks":
            first = structs.replace(first, block_scores=blocks)
        plan = self._attempt(roomy, step)(first, cutoff_s, False)
        if isinstance(plan, Bounded):
            return plan
        if is_best_of_one_stage(problem, plan):
            attempt = self._attempt(problem, step)
            if blocks and not first.block_scores:
                plan = in_blocks(Trials(attempt), StageForms([first.microbatches], job.remat), blocks, plan) or plan
            plan = _padded(attempt, plan, asked)
        return self._bounded(problem, counts, plan)

    def best(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float = math.inf
    ) -> Plan | Bounded:
        """The best plan; `Bounded` where none is found to stay below ``cutoff_s``.

        Args:
            problem: the step in one microbatch, where it runs, and what is asked for; what is None is free.
            step: the step in other forms.
            counts: numbers of microbatches that may be taken, the first is wanted; None where all may.
            cutoff_s: seconds of a step that the plan must stay below to be of use.

        Raises:
            InfeasiblePlanError: nothing fits the memory.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        job, asked = problem.job, self._asked(problem, step, counts)
        possible = MICROBATCHES.options(asked) or (1,) if counts is None else counts
        may_fit: Callable[[Sequence[int]], Sequence[int]] = partial(counts_that_may_fit, problem, step)
        if cutoff_s < math.inf and job.offload == "none" and not is_tiny(problem) and len(possible) > 2:
            possible, may_fit = may_fit(possible), tuple
        blocks = next(iter(BLOCKS.options(asked)), 0)
        attempt = self._attempt(problem, step)
        trials = Trials(attempt)
        relaxations = Trials(self._attempt(with_relaxation_only(problem), step)) if self.strategy is alpa else trials
        forms = StageForms(
            possible,
            job.remat,
            offload=job.offload != "none",
            demanded=job.offload == "layers",
            layered_updates=LAYERED_UPDATE.options(asked) or (False,),
            host_update=bool(HOST_UPDATE.options(asked)),
            backward_update=lambda: bool(BACKWARD_UPDATE.options(asked)),
            may_fit=may_fit,
            segments=partial(SEGMENTS.options, asked),
            segment_cost=problem.policy.stages.segment_cost,
        )
        plain: Plan | Bounded | None = None
        failure: InfeasiblePlanError | MicrobatchError | None = None
        if not blocks or problem.request.attention != "blocks":
            try:
                plain = one_stage(
                    trials, forms, cutoff_s=cutoff_s, relaxations=relaxations if is_tiny(problem) else None
                )
            except InfeasiblePlanError as error:
                failure = error
        plan = plain
        if blocks and not isinstance(plain, Bounded) and not isinstance(failure, MicrobatchError):
            trials = Trials(attempt)
            plan = in_blocks(trials, forms, blocks, plain) or plain
            if plan is None:
                plan = trials.bounded
                failure = failure or (None if plan is not None else trials.error())
        if isinstance(plan, Bounded):
            return plan
        if plan is None:
            assert failure is not None
            raise failure
        plan = _padded(attempt, plan, asked)
        if plan.content.memory_bound and job.offload == "none" and possible[0] == 1:
            plan = _noted(plan, step.update_in_backward()[1])
        return self._bounded(problem, counts, plan)

    def _asked(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Asked:
        """Question to techniques about a step; arguments as of `best`."""
        job = replace(problem.job, num_microbatches=counts[0] if counts else None)
        return Asked(
            replace(problem, job=job),
            named=names_plan(self.strategy),
            updates_by_layer=step.may_update_by_layer,
            updates_in_backward=lambda: step.update_in_backward()[0],
        )

    def _attempt(self, problem: Problem, step: StepSource) -> Callable[[StepForm, float, bool], Plan | Bounded]:
        """A function that plans one stage in a configuration; see `Trials`."""

        freedom = Freedom.of(problem)
        # A form may leave on devices what is to lie on hosts: then the choice among the forms is offered, not each.
        watcher = None if problem.job.offload == "layers" else problem.anytime

        def attempt(form: StepForm, cutoff_s: float, explain: bool) -> Plan | Bounded:
            problem.spend()
            if explain:  # it was tried before
                return planned(form, cutoff_s, explain)
            region, limit = region_of(form), problem.memory_limit_bytes
            return problem.trail.tried(region, problem.meter, limit, lambda: planned(form, cutoff_s, explain))

        def planned(form: StepForm, cutoff_s: float, explain: bool) -> Plan | Bounded:
            formed = step.in_form(form)
            reporting = replace(problem.reporting, explains_infeasible=explain)
            stage = problem_in_form(replace(problem, reporting=reporting), formed, cutoff_s)

            def in_form(plan: Plan) -> Plan:
                there = any(o.on_host for o in plan.content.operators)
                notes = (*PADDING.notes(problem.graph, form.padded), *meetings(formed.graph))
                content = plan.content.in_form(structs.replace(formed.form, host_update=there), notes)
                return replace(plan, content=content)

            converted = watcher and Converted(watcher, lambda p: bounded(in_form(p), problem, freedom))
            answer = self._shard(replace(stage, anytime=converted))
            if isinstance(answer, Bounded):
                return answer
            plan = in_form(answer)
            if watcher is not None:
                watcher.offer(bounded(plan, problem, freedom))
            return plan

        return attempt

    def _bounded(self, problem: Problem, counts: Sequence[int] | None, plan: Plan) -> Plan:
        """A plan of one stage with a bound over all that was free.

        Where memory binds readers may share a conversion that the integer program counts for each of them: what it
        proves is no bound of other shardings then.
        """
        job = problem.job
        free = job.num_stages is None or counts is None or job.remat == "auto" or plan.content.memory_bound
        return bounded(plan, problem, Freedom.of(problem)) if free else plan

    def _shard(self, problem: Problem) -> Plan | Bounded:
        problem.log(f"planning {len(problem.graph.operators)} operators for {problem.cluster}")
        return cached(self.strategy, self.cache)(problem)


def _padded(attempt: Callable[[StepForm, float, bool], Plan | Bounded], plan: Plan, asked: Asked) -> Plan:
    """A plan with padding where that is faster; arguments as of `with_padding`."""
    return with_padding(Trials(attempt), plan, PADDING.options(replace(asked, planned=plan.stages[0])))


def _noted(plan: Plan, note: str) -> Plan:
    """A plan with one more note; "" is none."""
    content = plan.content
    return replace(plan, content=structs.replace(content, notes=(*content.notes, note))) if note else plan


def problem_in_form(problem: Problem, formed: FormedStep, cutoff_s: float = math.inf) -> Problem:
    """Problem for a strategy that shards a step in a form.

    Args:
        problem: the step, and what is asked for.
        formed: it in the form.
        cutoff_s: seconds of a step that the plan must stay below to be of use.
    """
    form, job = formed.form, problem.job
    offload = "update" if form.host_update and job.offload == "auto" else job.offload
    job = replace(job, num_microbatches=form.microbatches, num_stages=1, schedule="auto", remat="auto", offload=offload)
    subproblem = replace(problem.subproblem, uniform_stages=False, cutoff_s=cutoff_s)
    return replace(problem, graph=formed.graph, job=job, subproblem=subproblem)


def is_tiny(problem: Problem) -> bool:
    """Whether a step is so small that all of its configurations are compared."""
    return len(problem.graph.operators) <= problem.policy.sizes.tiny_operators


def is_best_of_one_stage(problem: Problem, plan: Plan) -> bool:
    """Whether a plan in the first configuration is that which `one_stage` gives."""
    return problem.job.offload == "none" and not (is_tiny(problem) and plan.content.memory_bound)
