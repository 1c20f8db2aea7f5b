"""`Planner`: the whole decision, from a step and a cluster to one plan.

    enumerate       one stage, and pipelines where stages are free (`enumeration.forms`)
    one stage       microbatches x recomputation, each a problem of the integer program (`one_stage`)
    pipelines       microbatches x stages are ranked, layers profiled, stages cut by the dynamic program and each
                    planned exactly (`pipelines`)
    compose         the fastest, with a bound over all that was free (`bound`)

Forms are planned in one loop (`Planner._best`), each with what those before it say (`Tried`): it stops as soon as it
cannot be faster than the best plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.ir.analysis import unread_effects
from autopar.plan import Plan
from autopar.schedule import get
from autopar.search.anytime import Converted, Incumbent, SearchEndedError
from autopar.search.attention_blocks import stage_block_scores
from autopar.search.bound import Freedom, bound_s
from autopar.search.cache import PlanCache, cached, cached_with_branches, cached_with_stages
from autopar.search.clock import Clock
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.forms import EVEN_STAGES, ONE_STAGE, PIPELINES, Form, Tried, forms, forms_on_workers
from autopar.search.enumeration.reach import closed_by_reach, closed_without_overlap
from autopar.search.enumeration.search_space import is_large, stages_of_whole_nodes
from autopar.search.enumeration.whole_steps import (
    ranked_on_whole_nodes,
    stages_that_may_be_faster,
)
from autopar.search.executions import with_executions
from autopar.search.first_pipeline import first_pipeline
from autopar.search.notes import left_out
from autopar.search.outcome import Bounded, LeftOut
from autopar.search.problem import Problem
from autopar.search.registry import Strategy, cuts_stages, names_one_stage
from autopar.search.single_stage import OneStagePlanner, is_best_of_one_stage, is_tiny
from autopar.search.source import StepSource
from autopar.search.token_slices import in_slices
from autopar.search.trail import Region, Trail, outcome_of
from autopar.search.work import units, units_of
from autopar.solver.meter import Meter

#: Phase of the seconds that no phase of the plan has.
OTHER_ATTEMPTS = "other attempts"


@dataclass(frozen=True)
class Planner:
    """Plans steps.

    Args:
        strategy: shards one stage, or cuts the step into stages itself.
        cache: plans that are kept; None keeps none.
        tries_pipelines: whether stages are cut where their number is free and the strategy does not cut them itself.
        time_limit_s: seconds of searching after which the best plan known is the answer; None waits.
    """

    strategy: Strategy
    cache: PlanCache | None = None
    tries_pipelines: bool = True
    time_limit_s: float | None = None

    def plan(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Plan:
        """The fastest plan.

        Args:
            problem: the step in one microbatch, where it runs, and what is asked for; what is None is free.
            step: the step in other forms.
            counts: numbers of microbatches that may be taken, the first is wanted; None where all may.

        A search that its time limit or Ctrl-C ends returns the best plan known, with a note; it ends only then.

        Raises:
            InfeasiblePlanError: nothing fits the memory; the error is that of one stage where one was tried.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        incumbent, meter, trail = Incumbent.within(self.time_limit_s, problem.policy.effort.budget), Meter(), Trail()
        try:
            reporting = problem.reporting
            if reporting.log is not None:
                reporting = replace(reporting, log=incumbent.telling(reporting.log))
            watched = replace(problem, anytime=incumbent, reporting=reporting, meter=meter, trail=trail)
            cuts, tries = cuts_stages(self.strategy), self.tries_pipelines and not names_one_stage(self.strategy)
            plan = self._timed(watched, step, counts, forms(watched, cuts_stages=cuts, tries_pipelines=tries))
            plan = incumbent.fastest(plan, problem.policy.schedules.least_gain)
        except (SearchEndedError, KeyboardInterrupt) as ended:
            best = incumbent.cut_short(ended.cause if isinstance(ended, SearchEndedError) else "Ctrl-C")
            if best is None:
                raise
            plan = best
        return replace(_searched(plan, problem, step, meter, trail), incumbents=tuple(incumbent.history))

    def on_workers(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Plan:
        """The fastest plan of stages that workers in other processes carry out; arguments and errors as of `plan`."""
        tries = self.tries_pipelines and not cuts_stages(self.strategy) and not names_one_stage(self.strategy)
        meter, trail = Meter(), Trail()
        some = forms_on_workers(problem, tries_branches=tries)
        plan = self._timed(replace(problem, meter=meter, trail=trail), step, counts, some)
        return _searched(plan, problem, step, meter, trail)

    def _timed(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, some: Sequence[Form]) -> Plan:
        """`_best`, whose phases have the seconds of what it did not take: ranking, bounds, plans that lost."""
        clock = Clock()
        with clock.phase(OTHER_ATTEMPTS):
            plan = self._best(problem, step, counts, some)
        return replace(plan, phases=clock.rest(OTHER_ATTEMPTS, plan.phases))

    def _best(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, some: Sequence[Form]) -> Plan:
        """The fastest plan of ``some`` forms."""
        least_gain = problem.policy.schedules.least_gain
        tried, prints, left = Tried(), bool(unread_effects(problem.graph)), tuple(some)
        while left:
            form, *others = tried.ordered(
                left, partial(self._bound_s, PIPELINES, problem), problem.policy.effort.usual_gap
            )
            left = tuple(others)
            closed = None if tried.best is None else self._closed(form, problem, tried.cutoff_s)
            if closed is not None:
                problem.trail.close(_region(form, problem), closed)
                continue
            if prints and form.is_pipeline and tried.best is not None:
                break  # stages would leave the prints out
            if form == ONE_STAGE and tried.one_stage is not None and is_best_of_one_stage(problem, tried.one_stage):
                continue
            if (form == EVEN_STAGES and tried.best is not None) or (form == ONE_STAGE and tried.one_stage_is_slower):
                continue
            try:
                plan = self._of_form(form, problem, step, counts, tried)
            except (InfeasiblePlanError, MicrobatchError) as error:
                problem.trail.close(Region(form.name), outcome_of(error, problem.memory_limit_bytes))
                tried = tried.failed(form, error)
                continue
            if isinstance(plan, Bounded):
                problem.trail.close(Region(form.name), plan)
                tried = tried.closed(form)
                continue
            tried = tried.planned(form, plan, least_gain)
            problem.offer(tried.best or plan)
            problem.checkpoint()
            if left:
                problem.spend()
        if tried.best is None:
            raise tried.failures[0] from None
        return tried.best

    def _bound_s(self, form: Form, problem: Problem) -> float:
        """Seconds that no plan of a form is below."""
        freedom = Freedom.of(problem)
        several = freedom.most_stages if form.is_pipeline else 0
        return bound_s(problem, replace(freedom, one_stage=not form.is_pipeline, most_stages=several))

    def _closed(self, form: Form, problem: Problem, best_s: float) -> Bounded | None:
        """That no plan of a form saves enough of the best to be looked for, by its bound; None where one may."""
        gap = problem.policy.effort.gap_after(units_of(problem.meter))
        least_s = self._bound_s(form, problem)
        return Bounded("the bound of what is computed", least_s) if least_s >= (1 - gap) * best_s else None

    def _of_form(
        self, form: Form, problem: Problem, step: StepSource, counts: Sequence[int] | None, tried: Tried
    ) -> Plan | Bounded:
        """The best plan of a form, which must be faster than that of the forms ``tried``."""
        if form.is_pipeline:
            scores = stage_block_scores(problem, tried.one_stage)
            staged = replace(problem, subproblem=replace(problem.subproblem, block_scores=scores))
            if form == EVEN_STAGES:
                return self.even(staged, step, counts)
            if form.has_branches:
                return self.branches(staged, step, counts, tried.cutoff_s)
            # Estimates hide nothing: even stages leave out what one stage, whose share of that is known, would not.
            slack = problem.policy.partition.near_best if tried.one_stage is None else 1.0
            return self.pipeline(staged, step, counts, slack * tried.cutoff_s, tried.exposed)
        single = OneStagePlanner(self.strategy, self.cache)
        if not form.ample_memory:
            return single.best(problem, step, counts, tried.cutoff_s)
        return single.ample(problem, step, counts, tried.cutoff_s)

    def pipeline(
        self,
        problem: Problem,
        step: StepSource,
        counts: Sequence[int] | None,
        cutoff_s: float = math.inf,
        exposed: float = 1.0,
    ) -> Plan | Bounded:
        """The best plan with several stages; arguments as of `plan`, and seconds that it must stay below."""
        o = problem.options
        tried: tuple[int, ...] | None = None
        free = o.num_stages is None and schedule_of(problem).chunks == 1
        if cutoff_s < math.inf:
            if (closed := closed_by_reach(problem, counts, cutoff_s)) is not None:
                return closed
            if free and not is_large(problem) and not is_tiny(problem):
                faster = stages_that_may_be_faster(problem, step, counts, cutoff_s, exposed)
                if isinstance(faster, Bounded):
                    return faster
                tried = faster
        subproblem = replace(problem.subproblem, cutoff_s=cutoff_s, tried_stages=tried)
        bounded_above = replace(problem, subproblem=subproblem)
        if free and is_large(problem):
            return self._on_whole_nodes(bounded_above, step, counts, exposed)
        return self._in_stages(bounded_above, step, counts, cached_with_stages(self.strategy, self.cache))

    def _on_whole_nodes(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, exposed: float
    ) -> Plan | Bounded:
        """The plan of the first pair of stages and microbatches, by rising estimate, that fits a large cluster.

        Interleaved stages come first where they are estimated faster by what makes idle time long.
        """
        search, failures = cached_with_stages(self.strategy, self.cache), list[InfeasiblePlanError]()
        ranked, policy = ranked_on_whole_nodes(problem, step, counts, exposed), problem.policy
        if isinstance(ranked, Bounded):
            return ranked
        bounded = Bounded("no stages of whole nodes are estimated to be faster")
        interleaved = ranked.chunked(1 - policy.schedules.long_idle_share)
        if interleaved is not None and problem.options.schedule == "auto":
            try:
                plan = self._interleaved(problem, step, search, *interleaved)
                if not isinstance(plan, Bounded):
                    return plan
                problem.log(f"no interleaved stages: {plan.by}")
            except (InfeasiblePlanError, ScheduleError, MicrobatchError) as error:
                problem.log(f"no interleaved stages: {error.fact}")
        for _, stages, count in ranked.pairs[: policy.enumeration.most_planned_pairs]:
            subproblem = replace(problem.subproblem, tried_stages=(stages,))
            try:
                plan = self._in_stages(replace(problem, subproblem=subproblem), step, [count], search)
            except InfeasiblePlanError as error:
                failures.append(error)
                continue
            if not isinstance(plan, Bounded):
                return plan
            bounded = plan  # pairs of larger estimates are less likely to be faster
            break
        if failures:
            raise failures[0]
        return bounded

    def _interleaved(
        self,
        problem: Problem,
        step: StepSource,
        search: Strategy,
        workers: int,
        count: int,
        chunks: int,
    ) -> Plan | Bounded:
        """The plan with ``chunks`` stages on each of ``workers``, in ``count`` microbatches."""
        schedule, cutoff_s = get("interleaved", chunks=chunks), problem.subproblem.cutoff_s
        options = replace(problem.options, num_stages=workers * chunks, schedule=schedule)
        plan = self._in_stages(replace(problem, options=options), step, [count], search)
        if not isinstance(plan, Bounded) and plan.step_time >= cutoff_s:
            return Bounded("interleaved stages as they are planned", plan.step_time)
        return plan

    def even(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Plan | Bounded:
        """Even stages of as few whole nodes as may be, nothing of which is ranked; arguments, errors as of `plan`."""
        stages = stages_of_whole_nodes(problem)[-1:]
        if not stages:
            raise InfeasiblePlanError(f"no stages of {problem.graph.name} are whole nodes of {problem.cluster.name}")
        subproblem = replace(problem.subproblem, tried_stages=tuple(stages))
        search = partial(first_pipeline, intra=cached(self.strategy, self.cache))
        return self._in_stages(replace(problem, subproblem=subproblem), step, counts, search, one_loop=True)

    def branches(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float = math.inf
    ) -> Plan | Bounded:
        """The best plan with independent branches side by side; arguments and errors as of `pipeline`."""
        if cutoff_s < math.inf and (closed := closed_without_overlap(problem)) is not None:
            return closed
        subproblem = replace(problem.subproblem, cutoff_s=cutoff_s)
        asked = None if subproblem.uniform_stages else problem.options.num_stages  # else it is that of workers
        free = replace(problem, subproblem=subproblem, options=replace(problem.options, num_stages=asked))
        return self._in_stages(free, step, counts, cached_with_branches(self.strategy, self.cache))

    def _in_stages(
        self,
        problem: Problem,
        step: StepSource,
        counts: Sequence[int] | None,
        search: Strategy,
        one_loop: bool = False,
    ) -> Plan | Bounded:
        """The plan of a search that cuts stages, of the step with stacks taken apart, for one loop a stage if asked."""
        o, cluster = problem.options, problem.cluster
        problem.log(f"slicing {len(problem.graph.operators)} operators into stages for {cluster}")
        stages = o.num_stages or getattr(self.strategy, "num_stages", None)
        if stages is None and is_large(problem) and problem.subproblem.tried_stages:
            (stages,) = problem.subproblem.tried_stages
        most = problem.policy.enumeration
        groups = 2 * most.most_stages if is_large(problem) else most.most_stack_groups
        scores, loop = problem.subproblem.block_scores, one_loop or o.offload == "layers"
        layered = step.layered(stages, groups, one_loop=loop, block_scores=scores)
        options = replace(
            o,
            donated=layered.donated,
            constraints=layered.constraints,
            shared_stages=layered.shared_stages,
            num_microbatches=None if counts is None else counts[0],
        )
        whole = replace(
            problem,
            graph=layered.graph,
            cost_model=problem.cost_model.on(cluster),
            options=options,
            source=layered.source.metered(problem.meter),
            anytime=None if problem.anytime is None else Converted(problem.anytime, layered.of_step),
        )
        plan = search(whole)
        if isinstance(plan, Bounded):
            return plan
        if note := left_out(layered.graph):
            plan = replace(plan, content=msgspec.structs.replace(plan.content, notes=(*plan.content.notes, note)))
        if o.token_slices is not None:
            plan = in_slices(whole, layered.graph, plan, o.token_slices)
        return layered.of_step(plan)


def _searched(plan: Plan, problem: Problem, step: StepSource, meter: Meter, trail: Trail) -> Plan:
    """A plan with the work units and the trail of its search."""
    meter.merge(step.meter)
    devices, asked = problem.cluster.num_devices, problem.options.num_stages
    rule = _rule(problem) if asked is None else f"num_stages={asked} is asked for"
    known = trail.covered()
    if others := [n for n in range(1, devices + 1) if n not in known]:
        trail.close(Region.of_stages("pipeline", others), LeftOut(rule))
    details = msgspec.structs.replace(plan.details, work=units(meter), trail=trail.table())
    return with_executions(replace(plan, details=details), problem)


def _region(form: Form, problem: Problem) -> Region:
    """All plans of a form."""
    devices, asked = problem.cluster.num_devices, problem.options.num_stages
    if not form.is_pipeline:
        return Region(form.name, ((1, 1),))
    return Region(form.name, ((2, max(2, devices)),) if asked is None else ((asked, asked),))


def _rule(problem: Problem) -> str:
    """Why numbers of stages are left out of which nothing else tells, in words."""
    if is_large(problem):
        return "on so many nodes stages are whole nodes with nearly equal shares of the layers"
    return "more stages than parts that can be cut, or no even share of the devices"
