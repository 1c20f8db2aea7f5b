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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.ir.analysis import unread_effects
from autopar.microbatch import batch_size
from autopar.plan import Plan
from autopar.schedule import get
from autopar.search.alpa import alpa
from autopar.search.anytime import Converted, Incumbent, SearchEndedError
from autopar.search.attention_blocks import block_scores, stage_block_scores
from autopar.search.backward_update import BackwardUpdate, layered_updates
from autopar.search.bound import Freedom, bounded
from autopar.search.cache import PlanCache, cached, cached_with_branches, cached_with_stages
from autopar.search.clock import Clock
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.forms import EVEN_STAGES, ONE_STAGE, Form, Tried, forms, forms_on_workers
from autopar.search.enumeration.reach import may_be_faster, may_overlap
from autopar.search.enumeration.search_space import is_large, stages_of_whole_nodes
from autopar.search.enumeration.whole_steps import (
    counts_that_may_fit,
    ranked_on_whole_nodes,
    stages_that_may_be_faster,
)
from autopar.search.first_pipeline import first_pipeline
from autopar.search.looks import with_looks_only
from autopar.search.notes import left_out, meetings
from autopar.search.one_stage import OneStage, Shortage, first_configuration, in_blocks, one_stage, with_padding
from autopar.search.padding import padding_notes, paddings_of
from autopar.search.problem import NotFasterError, Problem, not_faster
from autopar.search.registry import Strategy, cuts_stages, names_one_stage, names_plan
from autopar.search.segments import Segments
from autopar.search.source import StepSource
from autopar.search.token_slices import in_slices
from autopar.search.trials import Trials

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
        incumbent = Incumbent.within(self.time_limit_s)
        try:
            reporting = problem.reporting
            if reporting.log is not None:
                reporting = replace(reporting, log=incumbent.telling(reporting.log))
            watched = replace(problem, anytime=incumbent, reporting=reporting)
            cuts, tries = cuts_stages(self.strategy), self.tries_pipelines and not names_one_stage(self.strategy)
            plan = self._timed(watched, step, counts, forms(watched, cuts_stages=cuts, tries_pipelines=tries))
            plan = incumbent.fastest(plan, problem.policy.schedules.least_gain)
        except (SearchEndedError, KeyboardInterrupt) as ended:
            best = incumbent.cut_short("Ctrl-C" if isinstance(ended, KeyboardInterrupt) else "its time limit")
            if best is None:
                raise
            plan = best
        return replace(plan, incumbents=tuple(incumbent.history))

    def on_workers(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Plan:
        """The fastest plan of stages that workers in other processes carry out; arguments and errors as of `plan`."""
        tries = self.tries_pipelines and not cuts_stages(self.strategy) and not names_one_stage(self.strategy)
        return self._timed(problem, step, counts, forms_on_workers(problem, tries_branches=tries))

    def _timed(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, some: Sequence[Form]) -> Plan:
        """`_best`, whose phases have the seconds of what it did not take: ranking, bounds, plans that lost."""
        clock = Clock()
        with clock.phase(OTHER_ATTEMPTS):
            plan = self._best(problem, step, counts, some)
        return replace(plan, phases=clock.rest(OTHER_ATTEMPTS, plan.phases))

    def _best(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, some: Sequence[Form]) -> Plan:
        """The fastest plan of ``some`` forms."""
        least_gain = problem.policy.schedules.least_gain
        tried, prints = Tried(), bool(unread_effects(problem.graph))
        for form in some:
            if prints and form.is_pipeline and tried.best is not None:
                break  # stages would leave the prints out
            if form == ONE_STAGE and tried.one_stage is not None and _is_best_of_one_stage(problem, tried.one_stage):
                continue
            if (form == EVEN_STAGES and tried.best is not None) or (form == ONE_STAGE and tried.one_stage_is_slower):
                continue
            try:
                plan = self._of_form(form, problem, step, counts, tried)
            except (InfeasiblePlanError, MicrobatchError) as error:
                tried = tried.failed(form, error)
                continue
            tried = tried.planned(form, plan, least_gain)
            problem.offer(tried.best or plan)
            problem.checkpoint()
        if tried.best is None:
            raise tried.failures[0] from None
        return tried.best

    def _of_form(
        self, form: Form, problem: Problem, step: StepSource, counts: Sequence[int] | None, tried: Tried
    ) -> Plan:
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
        if not form.ample_memory:
            return self.single_stage(problem, step, counts, tried.cutoff_s)
        return self._ample_stage(problem, step, counts, tried.cutoff_s)

    def _ample_stage(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float) -> Plan:
        """The plan of one stage in the first configuration, where memory is ample; arguments as of `single_stage`."""
        roomy = replace(problem, subproblem=replace(problem.subproblem, ample_memory=True))
        o, blocks = problem.options, block_scores(problem)
        first = first_configuration(counts or [1], o.remat)
        if blocks and o.attention == "blocks":
            first = replace(first, block_scores=blocks)
        plan = self._attempt(roomy, step)(first, cutoff_s, False)
        if _is_best_of_one_stage(problem, plan):
            attempt = self._attempt(problem, step)
            if blocks and not first.block_scores:
                plan = in_blocks(Trials(attempt), [first.count], o.remat, blocks, plan) or plan
            plan = with_padding(Trials(attempt), plan, paddings_of(problem, plan))
        return self._bounded(problem, counts, plan)

    def single_stage(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float = math.inf
    ) -> Plan:
        """The best plan of one stage; arguments as of `plan`, and seconds that it must stay below."""
        o, size = problem.options, batch_size(problem.graph) or 1
        possible = [2**k for k in range(size.bit_length())] if counts is None else counts
        may_fit: Callable[[Sequence[int]], Sequence[int]] = partial(counts_that_may_fit, problem, step)
        if cutoff_s < math.inf and o.offload == "none" and not _is_tiny(problem) and len(possible) > 2:
            possible, may_fit = may_fit(possible), tuple
        blocks = block_scores(problem)
        layered, there = layered_updates(o.offload, step), o.offload == "auto" and not names_plan(self.strategy)
        attempt = self._attempt(problem, step)
        trials = Trials(attempt)
        looks = Trials(self._attempt(with_looks_only(problem), step)) if self.strategy is alpa else trials
        in_backward = BackwardUpdate(step, o.offload)
        segments, least = Segments(problem, step, names_plan(self.strategy)), problem.policy.stages.segment_cost
        shortage = Shortage(in_backward, may_fit, segments, least)
        plain: Plan | None = None
        failure: InfeasiblePlanError | MicrobatchError | None = None
        if not blocks or o.attention != "blocks":
            try:
                plain = one_stage(
                    trials,
                    possible,
                    o.remat,
                    offload=o.offload != "none",
                    layered_updates=layered,
                    host_update=there,
                    shortage=shortage,
                    cutoff_s=cutoff_s,
                    looks=looks if _is_tiny(problem) else None,
                )
            except InfeasiblePlanError as error:
                failure = error
        if not blocks or isinstance(failure, MicrobatchError | NotFasterError):
            plan = plain
        else:
            trials = Trials(attempt)
            plan = in_blocks(trials, possible, o.remat, blocks, plain, layered, there, shortage) or plain
            failure = failure or (None if plan is not None else trials.error())
        if plan is None:
            assert failure is not None
            raise failure
        plan = in_backward.noted(with_padding(Trials(attempt), plan, paddings_of(problem, plan)))
        return self._bounded(problem, counts, plan)

    def _attempt(self, problem: Problem, step: StepSource) -> Callable[[OneStage, float, bool], Plan]:
        """What plans one stage in a configuration; see `Trials`."""

        freedom = Freedom.of(problem)

        def attempt(configuration: OneStage, cutoff_s: float, explain: bool) -> Plan:
            c, count, level = configuration, configuration.count, configuration.level
            inside = c.backward_update, c.segment_layers
            single = step.single_stage(count, level, c.block_scores, c.layered_update, c.padded, *inside)
            options = replace(problem.options, num_microbatches=count, num_stages=1, schedule="auto", remat="auto")
            if c.host_update and options.offload == "auto":
                options = replace(options, offload="update")
            subproblem = replace(problem.subproblem, uniform_stages=False, cutoff_s=cutoff_s)
            reporting = replace(problem.reporting, explains_infeasible=explain)
            stage = replace(problem, options=options, subproblem=subproblem, reporting=reporting)

            def in_form(plan: Plan) -> Plan:
                content = plan.content.in_form(level, single.layer_ends, c.layered_update, *inside)
                content = content.in_blocks(c.block_scores)
                content = content.with_padding(c.padded, padding_notes(problem.graph, c.padded))
                notes = (*content.notes, *meetings(single.graph))
                return replace(plan, content=msgspec.structs.replace(content, notes=notes))

            looks = problem.anytime and Converted(problem.anytime, lambda p: bounded(in_form(p), problem, freedom))
            plan = in_form(self._shard(replace(stage, graph=single.graph, anytime=looks)))
            problem.offer(bounded(plan, problem, freedom))
            return plan

        return attempt

    def _bounded(self, problem: Problem, counts: Sequence[int] | None, plan: Plan) -> Plan:
        """A plan of one stage with a bound over all that was free.

        Where memory binds readers may share a conversion that the integer program counts for each of them: what it
        proves is no bound of other shardings then.
        """
        o = problem.options
        free = o.num_stages is None or counts is None or o.remat == "auto" or plan.content.memory_bound
        return bounded(plan, problem, Freedom.of(problem)) if free else plan

    def pipeline(
        self,
        problem: Problem,
        step: StepSource,
        counts: Sequence[int] | None,
        cutoff_s: float = math.inf,
        exposed: float = 1.0,
    ) -> Plan:
        """The best plan with several stages; arguments as of `single_stage`, ``exposed`` that of a plan of one stage.

        Raises:
            NotFasterError: none takes less than ``cutoff_s``.
        """
        o = problem.options
        tried: tuple[int, ...] | None = None
        free = o.num_stages is None and schedule_of(problem).chunks == 1
        if cutoff_s < math.inf:
            may_be_faster(problem, counts, cutoff_s)
            if free and not is_large(problem) and not _is_tiny(problem):
                tried = stages_that_may_be_faster(problem, step, counts, cutoff_s, exposed)
        subproblem = replace(problem.subproblem, cutoff_s=cutoff_s, tried_stages=tried)
        bounded_above = replace(problem, subproblem=subproblem)
        if free and is_large(problem):
            return self._on_whole_nodes(bounded_above, step, counts, exposed)
        return self._in_stages(bounded_above, step, counts, cached_with_stages(self.strategy, self.cache))

    def _on_whole_nodes(self, problem: Problem, step: StepSource, counts: Sequence[int] | None, exposed: float) -> Plan:
        """The plan of the first pair of stages and microbatches, by rising estimate, that fits a large cluster.

        Interleaved stages come first where they are estimated faster by what makes idle time long.
        """
        search, failures = cached_with_stages(self.strategy, self.cache), list[InfeasiblePlanError]()
        ranked, policy = ranked_on_whole_nodes(problem, step, counts, exposed), problem.policy
        interleaved = ranked.chunked(1 - policy.schedules.long_idle_share)
        if interleaved is not None and problem.options.schedule == "auto":
            try:
                return self._interleaved(problem, step, search, *interleaved)
            except (InfeasiblePlanError, ScheduleError, MicrobatchError) as error:
                problem.log(f"no interleaved stages: {error.fact}")
        for _, stages, count in ranked.pairs[: policy.enumeration.most_planned_pairs]:
            subproblem = replace(problem.subproblem, tried_stages=(stages,))
            try:
                return self._in_stages(replace(problem, subproblem=subproblem), step, [count], search)
            except InfeasiblePlanError as error:
                failures.append(error)
                if isinstance(error, NotFasterError):  # pairs of larger estimates are less likely to be
                    break
        raise failures[0] if failures else not_faster(problem, problem.subproblem.cutoff_s, "no stages of whole nodes")

    def _interleaved(
        self,
        problem: Problem,
        step: StepSource,
        search: Strategy,
        workers: int,
        count: int,
        chunks: int,
    ) -> Plan:
        """The plan with ``chunks`` stages on each of ``workers``, in ``count`` microbatches.

        Raises:
            NotFasterError: it does not take less than the plan at hand.
        """
        schedule, cutoff_s = get("interleaved", chunks=chunks), problem.subproblem.cutoff_s
        options = replace(problem.options, num_stages=workers * chunks, schedule=schedule)
        plan = self._in_stages(replace(problem, options=options), step, [count], search)
        if plan.step_time >= cutoff_s:
            raise not_faster(problem, cutoff_s, "interleaved stages take as long")
        return plan

    def even(self, problem: Problem, step: StepSource, counts: Sequence[int] | None) -> Plan:
        """Even stages of as few whole nodes as may be, nothing of which is ranked; arguments, errors as of `plan`."""
        stages = stages_of_whole_nodes(problem)[-1:]
        if not stages:
            raise InfeasiblePlanError(f"no stages of {problem.graph.name} are whole nodes of {problem.cluster.name}")
        subproblem = replace(problem.subproblem, tried_stages=tuple(stages))
        search = partial(first_pipeline, intra=cached(self.strategy, self.cache))
        return self._in_stages(replace(problem, subproblem=subproblem), step, counts, search, one_loop=True)

    def branches(
        self, problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float = math.inf
    ) -> Plan:
        """The best plan with independent branches side by side; arguments and errors as of `pipeline`."""
        if cutoff_s < math.inf:
            may_overlap(problem, cutoff_s)
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
    ) -> Plan:
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
            source=layered.source,
            anytime=None if problem.anytime is None else Converted(problem.anytime, layered.of_step),
        )
        plan = search(whole)
        if note := left_out(layered.graph):
            plan = replace(plan, content=msgspec.structs.replace(plan.content, notes=(*plan.content.notes, note)))
        if o.token_slices is not None:
            plan = in_slices(whole, layered.graph, plan, o.token_slices)
        return layered.of_step(plan)

    def _shard(self, problem: Problem) -> Plan:
        problem.log(f"planning {len(problem.graph.operators)} operators for {problem.cluster}")
        return cached(self.strategy, self.cache)(problem)


def _is_tiny(problem: Problem) -> bool:
    return len(problem.graph.operators) <= problem.policy.sizes.tiny_operators


def _is_best_of_one_stage(problem: Problem, plan: Plan) -> bool:
    """Whether a plan in the first configuration is that which `one_stage` gives."""
    return problem.options.offload == "none" and not (_is_tiny(problem) and plan.content.memory_bound)
