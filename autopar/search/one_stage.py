"""`OneStagePlanner`: the best plan of one stage, in whatever microbatches, with whatever recomputation.

`one_stage` tries the forms of a stage, those that take least first: numbers of microbatches and levels of
recomputation, attention in blocks, layers in segments, padding, values in host memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.errors.names import counted
from autopar.ir import Graph
from autopar.ir.loops import microbatch_loops
from autopar.microbatch import even_counts
from autopar.plan import Plan, StepForm
from autopar.plan.form import TECHNIQUES
from autopar.plan.types import dtype_and_shape
from autopar.recompute import Level
from autopar.search.alpa import alpa
from autopar.search.anytime import Converted
from autopar.search.bound import Freedom, bounded
from autopar.search.cache import cached
from autopar.search.clock import units_of
from autopar.search.mesh_bounds import with_relaxation_only
from autopar.search.outcome import Bounded
from autopar.search.pipeline.whole_steps import counts_that_may_fit
from autopar.search.problem import Problem
from autopar.search.registry import names_plan
from autopar.search.source import FormedStep
from autopar.search.step_problem import StepProblem
from autopar.search.sure_work import forward_share
from autopar.search.techniques import (
    Asked,
    block_scores,
    layered_updates,
    levels_of,
    may_update_in_backward,
    may_update_on_hosts,
    padded_dims,
    padding_notes,
    segments_of,
)
from autopar.search.trail import Region
from autopar.search.trials import Trials
from autopar.sharding.padding import PaddedDim


class OneStagePlanner(StepProblem):
    """Plans a step as one stage."""

    def ample(self, cutoff_s: float) -> Plan | Bounded:
        """The plan of one stage in the form that is tried first, where memory is ample.

        `Bounded` where it does not stay below ``cutoff_s``.

        Args:
            cutoff_s: seconds of a step that the plan must stay below to be of use.
        """
        problem, counts = self.problem, self.counts
        roomy = replace(problem, subproblem=replace(problem.subproblem, ample_memory=True))
        job, asked = problem.job, self._asked
        blocks = block_scores(problem)
        first = first_configuration(counts or [1], job.remat)
        if blocks and problem.request.attention == "blocks":
            first = structs.replace(first, block_scores=blocks)
        plan = self._attempt(roomy)(first, cutoff_s, False)
        if isinstance(plan, Bounded):
            return plan
        if is_best_of_one_stage(problem, plan):
            attempt = self._attempt(problem)
            if blocks and not first.block_scores:
                plan = in_blocks(Trials(attempt), StageForms([first.microbatches], job.remat), blocks, plan) or plan
            plan = _padded(attempt, plan, asked)
        return self._bounded(plan)

    def best(self, cutoff_s: float = math.inf) -> Plan | Bounded:
        """The best plan; `Bounded` where none is found to stay below ``cutoff_s``.

        Args:
            cutoff_s: seconds of a step that the plan must stay below to be of use.

        Raises:
            InfeasiblePlanError: nothing fits the memory.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        problem, step, counts = self.problem, self.step, self.counts
        job, asked = problem.job, self._asked
        possible = even_counts(problem.graph) if counts is None else counts
        nothing_fits = self.state_too_large(with_gradients=False) is not None
        may_fit: Callable[[Sequence[int]], Sequence[int]] = partial(counts_that_may_fit, problem, step)
        if nothing_fits:
            may_fit = list
        stored_from = possible[0]
        has_rival = cutoff_s < math.inf and job.offload == "none"
        if has_rival and not (nothing_fits or is_tiny(problem)) and len(possible) > 2:
            fit = may_fit(possible)
            stored_from, may_fit = fit[0], lambda counts: [count for count in counts if count >= fit[0]]
        blocks = block_scores(problem)
        attempt, ends = self._attempt(problem), self._is_long if nothing_fits else bool
        trials = Trials(attempt, ends)
        if nothing_fits:  # the form that is likely to hold least says how much would do
            trials.run([StepForm(possible[-1], levels_of(job.remat)[-1])])
        relaxations = Trials(self._attempt(with_relaxation_only(problem))) if self.strategy is alpa else trials
        forms = StageForms(
            possible,
            job.remat,
            offload=job.offload != "none",
            demanded=job.offload == "layers",
            layered_updates=layered_updates(asked),
            host_update=may_update_on_hosts(asked),
            backward_update=partial(may_update_in_backward, asked),
            stored_from=stored_from,
            may_fit=may_fit,
            segments=partial(segments_of, asked),
            forward_share=partial(forward_share, problem.graph, problem.cost_model, blocks),
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
            trials = Trials(attempt, ends)
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
        return self._bounded(plan)

    def segmented(self, count: int) -> tuple[StepForm, ...]:
        """The form with segments of layers that is tried first in so many microbatches, if it may be tried."""
        return tuple(StepForm(count, segment_layers=layers) for layers in segments_of(self._asked)[:1])

    def _is_long(self) -> bool:
        """Whether so much work is spent that what may still be won must be worth it."""
        return units_of(self.problem.meter) >= self.problem.policy.effort.large_work

    @property
    def _asked(self) -> Asked:
        """Question to techniques about the step."""
        return Asked(
            self.problem,
            named=names_plan(self.strategy),
            updates_by_layer=self.step.may_update_by_layer,
            updates_in_backward=lambda: self.step.update_in_backward()[0],
        )

    def _attempt(self, problem: Problem) -> Callable[[StepForm, float, bool], Plan | Bounded]:
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
            formed = self.step.in_form(form)
            reporting = replace(problem.reporting, explains_infeasible=explain)
            stage = problem_in_form(replace(problem, reporting=reporting), formed, cutoff_s)

            def in_form(plan: Plan) -> Plan:
                there = any(o.on_host for o in plan.content.operators)
                notes = (*padding_notes(problem.graph, form.padded), *_meetings(formed.graph))
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

    def _bounded(self, plan: Plan) -> Plan:
        """A plan of one stage with a bound over all that was free.

        Where memory binds readers may share a conversion that the integer program counts for each of them: what it
        proves is no bound of other shardings then.
        """
        job = self.problem.job
        free = job.num_stages is None or self.counts is None or job.remat == "auto" or plan.content.memory_bound
        return bounded(plan, self.problem, Freedom.of(self.problem)) if free else plan

    def _shard(self, problem: Problem) -> Plan | Bounded:
        problem.log(f"planning {counted(len(problem.graph.operators), 'operator')} for {problem.cluster}")
        return cached(self.strategy, self.cache)(problem)


def _padded(attempt: Callable[[StepForm, float, bool], Plan | Bounded], plan: Plan, asked: Asked) -> Plan:
    """A plan with padding where that is faster; arguments as of `with_padding`."""
    return with_padding(Trials(attempt), plan, padded_dims(replace(asked, planned=plan.stages[0])))


def _noted(plan: Plan, note: str) -> Plan:
    """A plan with one more note; "" is none."""
    content = plan.content
    return replace(plan, content=structs.replace(content, notes=(*content.notes, note))) if note else plan


def _meetings(graph: Graph) -> list[str]:
    """Note on meetings of examples, where a step in one stage has several loops over microbatches."""
    loops = microbatch_loops(graph)
    if loops < 2:
        return []
    return [f"examples meet: {loops} loops over the microbatches run the forward pass {loops} times"]


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
    """Whether a plan in the form that is tried first is the best of one stage, so that no other form is tried."""
    return problem.job.offload == "none" and not (is_tiny(problem) and plan.content.memory_bound)


def region_of(form: StepForm) -> Region:
    """The region of the decision that a form of one stage is."""
    of_region = ("microbatches", "remat")  # fields of a region of their own
    parts = [name for t in TECHNIQUES if t.field not in of_region and (name := t.name_in(form))]
    how = f"with {', '.join(parts)}" if parts else ""
    return Region("one stage", ((1, 1),), (form.microbatches,), "none", form.remat, how)


def first_configuration(counts: Sequence[int], remat: str) -> StepForm:
    """The form that is tried first: as few microbatches and as little recomputation as may be.

    Args:
        counts: numbers of microbatches, rising.
        remat: the level of recomputation that is asked for, or "auto".
    """
    return StepForm(counts[0], levels_of(remat)[0])


@dataclass(frozen=True)
class StageForms:
    """Forms of one stage that may be tried.

    Args:
        counts: numbers of microbatches, rising.
        remat: "auto", or what is recomputed.
        offload: whether something may lie in host memory.
        demanded: whether as much of the state as can must lie there; a plan that holds less there is no choice then,
            however fast.
        layered_updates: where something may lie there, whether layers are updated one at a time, in order of trial.
        host_update: where something may lie there, whether hosts may update it: tried last.
        backward_update: whether stacks may be updated in the backward loop, where memory is short.
        stored_from: least number of microbatches in which a form that recomputes nothing is tried.
        may_fit: of numbers of microbatches, rising, those from the first on in which it may fit.
        segments: numbers of layers a segment with which loops over layers keep less, the best first.
        forward_share: share of the forward pass in a step, which these run once more: where the limit costs as much,
            they are tried though the first configuration fits.
    """

    counts: Sequence[int]
    remat: str = "auto"
    offload: bool = False
    demanded: bool = False
    layered_updates: Sequence[bool] = (False,)
    host_update: bool = False
    backward_update: Callable[[], bool] = lambda: False
    stored_from: int = 1
    may_fit: Callable[[Sequence[int]], Sequence[int]] = lambda counts: counts
    segments: Callable[[], Sequence[int]] = tuple
    forward_share: Callable[[], float] = lambda: math.inf

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of recomputation, the first that is tried first."""
        return levels_of(self.remat)


def one_stage(
    trials: Trials[StepForm, Plan],
    forms: StageForms,
    *,
    cutoff_s: float = math.inf,
    relaxations: Trials[StepForm, Plan] | None = None,
) -> Plan | Bounded:
    """The plan of one stage; `Bounded` where none is found to stay below ``cutoff_s``.

    One microbatch is taken and nothing recomputed where that fits. Where memory is short of it, stacks of layers are
    updated inside of the backward loop, if that may be and is as fast. Else the fewest microbatches are taken with
    which some plan does; where none does, as little is recomputed as must be. Segments of layers are taken instead
    where they fit and are faster. Of a tiny step, and where state may lie in host memory, all configurations up to the
    first that the limit has no part in are compared, and the fastest is taken. With host memory, what enters segments
    may lie there too.

    Args:
        trials: plans in a number of microbatches at a level of recomputation.
        forms: that may be tried.
        cutoff_s: seconds of a step that a plan must stay below to be of use. More microbatches and more work cost more
            time, so the first configuration that fits and does not stay below is the last.
        relaxations: of a tiny step, all of whose configurations may be tried: plans by relaxation within the limit,
            which takes a part of the time. In the order of their seconds most are given up by their bound. ``trials``
            itself where a strategy has no relaxations; None of other steps.

    Raises:
        InfeasiblePlanError: no configuration fits.
        MicrobatchError: no number of microbatches is possible.
    """
    levels, counts = forms.levels, forms.counts
    plan: Plan | None
    if forms.offload:
        configurations = [
            StepForm(count, level, layered_update=by)
            for by in forms.layered_updates
            for level in levels
            for count in counts
        ]
        if forms.host_update:
            configurations += [StepForm(count, level, host_update=True) for level in levels for count in counts]
        plans = trials.run(configurations, seconds=_seconds, ends=_nothing_on_host, cutoff_s=cutoff_s)
        if forms.demanded:
            most = max(map(_on_hosts, plans), default=0)
            plans = [p for p in plans if _on_hosts(p) == most]
        plan = min(plans, key=_seconds, default=None)
        short = trials.bounded is None if plan is None else plan.content.memory_bound
        if short and not forms.demanded:
            plan = _in_segments(trials, forms, configurations[0], plan, cutoff_s)
    elif relaxations is not None:
        configurations = [StepForm(count, level) for count in counts for level in levels]
        first, in_loop = configurations[0], counts[0] == 1 and forms.backward_update()
        if in_loop:
            configurations[1:1] = [StepForm(1, level, backward_update=True) for level in levels]
        for update in (False, True)[: 1 + in_loop]:
            configurations += [
                structs.replace(first, backward_update=update, segment_layers=k) for k in forms.segments()
            ]
        plan = _fastest(trials, relaxations, configurations, cutoff_s)
    else:
        plan = _in_device_memory(trials, forms, cutoff_s)
    return _planned(trials, plan, forms.remat)


def _planned(trials: Trials[StepForm, Plan], plan: Plan | None, remat: str) -> Plan | Bounded:
    """The plan; where there is none why, with the remedy that recomputation fixed by name leaves."""
    if plan is not None:
        return plan
    if trials.bounded is not None:
        return trials.bounded
    error = trials.error()
    if remat == "auto" or not isinstance(error, InfeasiblePlanError) or error.remedy is None:
        raise error
    raise InfeasiblePlanError(
        error.fact,
        cause=error.cause,
        remedy=f"remat='auto' in place of {remat!r}, which need not be the form that holds least; or {error.remedy}",
        source=error.source,
        least_bytes=error.least_bytes,
    )


def in_blocks(trials: Trials[StepForm, Plan], forms: StageForms, block_scores: int, plain: Plan | None) -> Plan | None:
    """The plan of one stage with attention in blocks; None where none fits, or is as fast as ``plain``.

    Attention in blocks stores no scores, and so needs less memory. It is tried without recomputation and microbatches
    first, where the plain form needs them. Where the plain form does not fit, the first configuration is taken that
    does.

    Args:
        trials: plans forms of the step on one stage, each once.
        forms: numbers of microbatches and levels of recomputation that may be tried.
        block_scores: scores of one head from which attention runs in blocks.
        plain: the plan of the plain form; None where none fits.
    """
    counts, levels = forms.counts, forms.levels
    if plain is None:
        updates = [*((by_layer, False) for by_layer in forms.layered_updates), *[(False, True)] * forms.host_update]
        each = itertools.product(updates, levels, counts)
        tried = [
            StepForm(count, level, block_scores=block_scores, layered_update=by_layer, host_update=on_hosts)
            for (by_layer, on_hosts), level, count in each
        ]
        in_loop = counts[0] == 1 and forms.backward_update()
        if in_loop:
            updated = [StepForm(1, level, block_scores=block_scores, backward_update=True) for level in levels]
            tried = [tried[0], updated[0], *tried[1:], *updated[1:]]
        short = StepForm(counts[0], levels[0], block_scores=block_scores, backward_update=in_loop)
        return trials.first([*tried, *(structs.replace(short, segment_layers=k) for k in forms.segments())])
    same = structs.replace(plain.stages[0].form, block_scores=block_scores).asked
    least = StepForm(counts[0], levels[0], block_scores=block_scores, layered_update=forms.layered_updates[0])
    configurations = dict.fromkeys([least, same])
    plans = trials.run(configurations, seconds=_seconds, cutoff_s=plain.step_time)
    return min((p for p in plans if p.step_time < plain.step_time), key=_seconds, default=None)


def with_padding(trials: Trials[StepForm, Plan], plan: Plan, padded: Sequence[tuple[PaddedDim, ...]]) -> Plan:
    """The plan of one stage with dims padded in the first of some ways that is faster than ``plan``; else ``plan``.

    Args:
        trials: plans of one stage.
        plan: without padding; what it chose otherwise is kept.
        padded: ways to pad, each one dim of each part that is padded.
    """
    for dims in padded:
        same = structs.replace(plan.stages[0].form, padded=dims).asked
        plans = trials.run([same], seconds=_seconds, cutoff_s=plan.step_time)
        plan = min((*plans, plan), key=_seconds)
    return plan


def _in_device_memory(trials: Trials[StepForm, Plan], forms: StageForms, cutoff_s: float) -> Plan | None:
    """The plan of the first configuration that fits, or of the faster of the first two where memory is short.

    Arguments are those of `one_stage`.
    """
    counts, (first, *more) = forms.counts, forms.levels
    plain = [StepForm(count, first) for count in counts]
    plan = trials.first([form for form in plain[:1] if form.microbatches >= forms.stored_from], cutoff_s)
    short = trials.bounded is None if plan is None else plan.content.memory_bound
    in_loop = short and counts[0] == 1 and forms.backward_update()
    if in_loop:
        updated = [structs.replace(plain[0], backward_update=True)]
        plans = trials.run(updated, cutoff_s=cutoff_s if plan is None else plan.step_time)
        plan = min((p for p in (plan, *plans) if p is not None), key=_seconds, default=None)
    if plan is None and trials.bounded is None:
        may_fit = set(forms.may_fit(counts[1:]) if len(counts) > 2 else counts)
        some = [c for c in plain[1:] if c.microbatches in may_fit]
        plan = trials.first(some, cutoff_s) or _recomputed(trials, counts, more, cutoff_s)
        if plan is not None and plan.content.memory_bound and plan.num_microbatches == 1 and in_loop:
            updated = [structs.replace(plan.stages[0].form.asked, backward_update=True)]
            plans = trials.run(updated, seconds=_seconds, cutoff_s=plan.step_time)
            plan = min((plan, *plans), key=_seconds)
    if plan is None and trials.bounded is None and in_loop:
        plan = trials.first([structs.replace(plain[0], remat=level, backward_update=True) for level in more], cutoff_s)
    if not short:
        return plan
    return _in_segments(trials, forms, structs.replace(plain[0], backward_update=in_loop), plan, cutoff_s)


def _in_segments(
    trials: Trials[StepForm, Plan], forms: StageForms, first: StepForm, plan: Plan | None, cutoff_s: float
) -> Plan | None:
    """The plan of the first number of layers a segment that fits, if it is faster than ``plan``; else ``plan``.

    Args:
        trials: plans in a number of microbatches at a level of recomputation, each once.
        forms: numbers of microbatches and levels of recomputation that may be tried.
        first: the configuration that segments are made of.
        plan: the best without; None where none fits.
        cutoff_s: step time that a plan must stay below to be of use.
    """
    lengths = forms.segments()
    tried = [structs.replace(first, segment_layers=k) for k in lengths]
    if first.backward_update:  # gradients of a segment may take more than those of all layers would
        tried += [structs.replace(first, backward_update=False, segment_layers=k) for k in lengths]
    if not tried:
        return plan
    if plan is not None and plan.num_microbatches == first.microbatches and plan.stages[0].form.remat == first.remat:
        unlimited_s = plan.content.search.unlimited_s
        if unlimited_s is None or plan.step_time < (1 + forms.forward_share()) * unlimited_s:
            return plan
    segmented = trials.first(tried, cutoff_s if plan is None else min(cutoff_s, plan.step_time))
    possible = trials.possible(forms.counts)
    if segmented is None and plan is None and len(possible) > 1 and trials.bounded is None:
        least = structs.replace(tried[0], backward_update=False)
        segmented = trials.first([structs.replace(least, microbatches=possible[-1])], cutoff_s)
        if segmented is not None:
            between = [structs.replace(least, microbatches=count) for count in possible[1:-1]]
            segmented = trials.first(between, cutoff_s) or segmented
    return min((p for p in (plan, segmented) if p is not None), key=_seconds, default=None)


def _recomputed(
    trials: Trials[StepForm, Plan], counts: Sequence[int], levels: Sequence[Level], cutoff_s: float
) -> Plan | None:
    """The plan that recomputes as little as must be.

    Where that which keeps least does not fit, few of those between need to be tried: in one microbatch no gradients are
    accumulated next to it.
    """
    possible = trials.possible(counts)
    if not levels or not possible or trials.bounded is not None:
        return None
    plan = trials.first([StepForm(possible[-1], levels[-1])], cutoff_s)
    if plan is not None or trials.bounded is not None:
        between = [StepForm(count, level) for level in levels for count in possible]
        return trials.first(between[:-1], cutoff_s) or plan
    return trials.first([StepForm(possible[0], level) for level in levels], cutoff_s) if len(possible) > 1 else None


def _fastest(
    trials: Trials[StepForm, Plan],
    relaxations: Trials[StepForm, Plan],
    configurations: Sequence[StepForm],
    cutoff_s: float,
) -> Plan | None:
    """The fastest plan of a tiny step up to the first that the limit has no part in; arguments as of `one_stage`."""
    if relaxations is trials or len(configurations) == 1:
        plans = trials.run(configurations, seconds=_seconds, ends=_is_free_of_the_limit, cutoff_s=cutoff_s)
    else:
        plans = trials.run(_fastest_relaxation_first(relaxations, configurations), seconds=_seconds, cutoff_s=cutoff_s)
    return min(plans, key=_seconds, default=None)


def _fastest_relaxation_first(
    relaxations: Trials[StepForm, Plan], configurations: Sequence[StepForm]
) -> list[StepForm]:
    """Configurations up to the first that the limit has no part in, by seconds of relaxations; without one last."""
    seconds: dict[StepForm, float] = {}
    for c in configurations:
        plans = relaxations.run([c])
        seconds[c] = min(map(_seconds, plans), default=math.inf)
        if any(map(_is_free_of_the_limit, plans)):
            break
    return sorted(seconds, key=lambda c: seconds[c])


def _on_hosts(plan: Plan) -> int:
    """Numbers of the step's inputs that lie in host memory."""
    return sum(math.prod(dtype_and_shape(i.type)[1]) for i in plan.content.inputs if i.memory == "host")


def _nothing_on_host(plan: Plan) -> bool:
    return not plan.stages[0].host_bytes


def _is_free_of_the_limit(plan: Plan) -> bool:
    return plan.stages[0].form.remat == "none" and not plan.content.memory_bound


def _seconds(plan: Plan) -> float:
    return plan.step_time
