"""`Decision`: the regions of the whole decision, and how each is expanded by the loop (`autopar.search.loop`).

    one stage        relaxations of its meshes without a limit: its plan where memory is ample, else microbatches,
                     recomputation and the host (`autopar.search.one_stage`)
    pipelines        numbers of stages, each by the work of its stages, then by the whole step on the devices of one of
                     them, then planned (`autopar.search.pipeline.search`); where stages are whole nodes by
                     microbatches too
    branches         independent branches side by side on parts of the devices (`autopar.search.pipeline.branches`)

What the user asked for leaves regions out. It prices nothing and solves nothing itself.

The work of its stages ranks numbers of stages (`least_by_stages`): a pipeline of S equal stages on n = D / S devices
each takes, with m microbatches of which each takes t on all stages,

    T = t (m + (S - 1) / 3) / S + update / S + 2 (S - 1) latency,    t = sum over operators of t(o, m n)

with what is sure of each operator (`autopar.search.sure_work`) in its least seconds on each of so many devices. Nothing
is communicated inside a stage, and of the bubble a third is left, as where weight gradients fill it. That is an
estimate, for stages may be unequal; it is used for what is not planned at all, and no bound is made of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

from autopar.cost import LeastWork
from autopar.errors import InfeasiblePlanError, ScheduleError
from autopar.ir.analysis import unread_effects
from autopar.microbatch import even_counts
from autopar.schedule import factory_named, get, table_of
from autopar.schedule.branches import Branches
from autopar.search.bound import Freedom, bound_s
from autopar.search.loop import Expansion, Known, OpenRegion, Relaxation
from autopar.search.mesh_bounds import MemoryNotAmpleError
from autopar.search.one_stage import OneStagePlanner, is_best_of_one_stage
from autopar.search.outcome import Bounded, LeftOut, Outcome, TooLarge
from autopar.search.pipeline.branches import has_branches
from autopar.search.pipeline.candidates import schedule_of, trains
from autopar.search.pipeline.search_space import (
    is_large,
    is_small,
    may_have_stages,
    stage_counts,
    stages_of_whole_nodes,
    unevenness,
)
from autopar.search.pipeline.whole_steps import WHOLE_STEP, EqualStages, counts_that_may_fit, equal_stages
from autopar.search.problem import Problem
from autopar.search.registry import cuts_stages, names_one_stage
from autopar.search.several_stages import SeveralStages
from autopar.search.step_problem import StepProblem
from autopar.search.sure_work import sure_works
from autopar.search.techniques import block_scores, stage_block_scores
from autopar.search.trail import Region

#: What closes a number of stages, in words.
EQUAL_STAGES = "equal stages that send nothing, an estimate"


def least_by_stages(
    problem: Problem, counts: Sequence[int] | None, numbers: Sequence[int] | None = None
) -> dict[int, float]:
    """Seconds of the best equal pipeline by number of stages, of those that may run in some number of microbatches.

    Args:
        problem: the step in one microbatch.
        counts: numbers of microbatches that may be taken; None for all.
        numbers: of stages; None for those that are worth trying.
    """
    possible = counts or even_counts(problem.graph)
    cluster, cost = problem.cluster, problem.cost_model
    latency_s = min(g.intra.latency_s for g in cluster.groups)
    works: dict[bool, dict[LeastWork, float]] = {False: defaultdict(float), True: defaultdict(float)}
    for work in sure_works(problem.graph, cost, block_scores(problem)):
        works[work.phase == "update"][work.least] += work.runs

    @cache
    def each_s(parts: float, is_update: bool) -> float:
        return sum(runs * cost.least_s(least, parts) for least, runs in works[is_update].items())

    seconds: dict[int, float] = {}
    schedule, left = schedule_of(problem), problem.policy.schedules.bubble_left
    for stages in stage_counts(problem, schedule) if numbers is None else numbers:
        devices = cluster.num_devices / stages
        own_s = each_s(devices, True) / stages
        for count in possible:
            try:
                table_of(schedule, stages, count)
            except ScheduleError:
                continue
            busy_s = each_s(devices * count, False) * (count + (stages - 1) * left)
            step_s = busy_s / stages + own_s + 2 * (stages - 1) * latency_s
            seconds[stages] = min(step_s, seconds.get(stages, step_s))
    return seconds


#: Names of relaxations, as the trail has them.
WORK, MESH_RELAXATIONS = (
    "the bound of what is computed",
    "relaxations of meshes of all devices, an estimate",
)
#: Relaxations by number of stages.
_StageEstimates: TypeAlias = dict[int, EqualStages]
_UNEQUAL = "the whole step on the devices of one of nearly as many equal stages with the bubble, an estimate"
_INTERLEAVED = "interleaved stages by the whole step on the devices of one worker, an estimate"


def asks_for_branches(schedule: Any) -> bool:
    """Whether a schedule that was asked for is that of branches side by side."""
    if isinstance(schedule, str):
        return schedule not in ("auto", "none") and factory_named(schedule) is Branches
    return isinstance(schedule, Branches)


class Decision(StepProblem):
    """Enumerates the regions (sets of plans) of one problem, which the search plans or closes."""

    def regions(self, *, tries_pipelines: bool) -> tuple[OpenRegion, ...]:
        """All regions that may be planned: one stage, pipelines, branches side by side.

        A mesh that is asked for and has all devices is the mesh of one stage. Stages run what outputs need: a step that
        prints has several where they are asked for, or one does not fit.

        Args:
            tries_pipelines: whether pipelines are planned next to one stage where the number of stages is free.
        """
        problem, job, devices = self.problem, self.problem.job, self.problem.cluster.num_devices
        if asks_for_branches(job.schedule):
            return (self.branches(),)
        if (job.num_stages or 1) > 1 or (job.num_stages is None and devices > 1 and cuts_stages(self.strategy)):
            return (self.pipelines(),)
        tries_pipelines = tries_pipelines and not names_one_stage(self.strategy)
        if job.num_stages is not None or not tries_pipelines or devices == 1:
            return (self._exact_stage(),)
        if job.schedule not in ("auto", "none"):
            return (self.pipelines(), self._exact_stage(self._work))
        if unread_effects(problem.graph):
            return (self._one_stage(), self.pipelines(LeftOut("stages would leave out what the step prints")))
        if job.mesh_shape is not None and math.prod(job.mesh_shape) == devices:
            return (self._exact_stage(),)
        state = self._state_too_large()
        if state is not None:  # one stage says how much memory would do
            problem.trail.close(Region("pipeline", self._numbers(None)), state)
            return (self._exact_stage(),)
        several: tuple[OpenRegion, ...] = (self.pipelines(self._without_overlap()),)
        if job.schedule == "auto" and has_branches(problem):
            several = (*several, self.branches())
        if job.schedule == "auto" and is_large(problem):
            even = self._even()
            first = problem.cluster.num_nodes > problem.policy.sizes.many_nodes
            return (even, self._one_stage(), *several) if first else (self._one_stage(), even, *several)
        return (self._one_stage(), *several)

    def on_workers(self) -> tuple[OpenRegion, ...]:
        """Regions of plans that workers in other processes can run: several stages, or one on one worker.

        Branches are planned next to pipelines where the stages are as many as there are workers because nobody said how
        many.
        """
        problem = self.problem
        if asks_for_branches(problem.job.schedule):
            return (self.branches(),)
        free = problem.subproblem.uniform_stages and problem.job.schedule == "auto"
        free = free and problem.request.token_slices is None and problem.cluster.num_nodes > 1
        free = free and not cuts_stages(self.strategy) and not names_one_stage(self.strategy)
        return (self.pipelines(), self.branches()) if free and has_branches(problem) else (self.pipelines(),)

    # One stage.

    def _one_stage(self) -> OpenRegion:
        """One stage before any relaxation: planned at once where memory is ample."""

        def expand(known: Known) -> Expansion | Bounded:
            try:
                plan = self._one.ample(known.best_s)
            except InfeasiblePlanError as error:
                seconds = error.estimate_s if isinstance(error, MemoryNotAmpleError) else None
                seconds = seconds or 0.0
                region = self._exact_stage(self._mesh_relaxations, seconds)
                return Expansion(regions=(replace(region, expand=partial(self._by_microbatches, seconds)),))
            if isinstance(plan, Bounded):
                return plan
            if is_best_of_one_stage(self.problem, plan):
                return Expansion(plan)
            return Expansion(plan, (self._exact_stage(self._mesh_relaxations, 0.0),))

        return OpenRegion(Region("one stage", ((1, 1),)), expand)

    def _by_microbatches(self, seconds: float, known: Known) -> Expansion | Bounded:
        """One stage by relaxations in the fewest microbatches that may fit without recomputation."""
        possible = self._possible
        count = counts_that_may_fit(self.problem, self.step, possible)[0] if len(possible) > 1 else possible[0]
        if count == possible[0]:
            return Expansion(regions=(self._exact_stage(self._mesh_relaxations, seconds),))
        cutoff_s = known.best_s / self.problem.policy.effort.mesh_relaxations.usual
        equal = equal_stages(self.problem, self.step, EqualStages.of(self.problem, 1), count, cutoff_s)
        if equal is not None and equal.is_beyond:
            return Bounded(MESH_RELAXATIONS, known.best_s)
        seconds = seconds if equal is None else equal.busy_s(count)
        return Expansion(regions=(self._exact_stage(self._mesh_relaxations, seconds),))

    def _exact_stage(self, relaxation: Relaxation | None = None, seconds: float = 0.0) -> OpenRegion:
        """One stage in any microbatches, with any recomputation; what a relaxation says of it."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._one.best(known.best_s)
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("one stage", ((1, 1),))
        if relaxation is None:
            return OpenRegion(region, expand)
        least_s = self._bound_s(several=False)
        return OpenRegion(region, expand, relaxation, least_s, max(least_s, seconds))

    @property
    def _mesh_relaxations(self) -> Relaxation:
        return Relaxation(MESH_RELAXATIONS, self.problem.policy.effort.mesh_relaxations)

    @property
    def _work(self) -> Relaxation:
        return Relaxation(WORK, self.problem.policy.effort.work)

    # Several stages.

    def pipelines(self, only_without: Outcome | None = None) -> OpenRegion:
        """The region of all plans with several stages.

        Args:
            only_without: closes the region once there is any plan; None where it competes with other plans.
        """
        job = self.problem.job
        free = job.num_stages is None and schedule_of(self.problem).chunks == 1
        if not free or (cuts_stages(self.strategy) and not is_large(self.problem)):
            return replace(self._stages(None), only_without=only_without)

        def expand(known: Known) -> Expansion | Bounded:
            regions = tuple(self._by_work())
            if not regions:
                return Expansion(regions=(self._stages(None),))  # its error says why there are none
            return Expansion(regions=regions)

        least_s, relaxation = self._bound_of_several_s(only_without), self._work
        region = Region("pipeline", self._numbers(None))
        return OpenRegion(region, expand, relaxation, least_s, least_s, only_without=only_without)

    def _by_work(self) -> Iterator[OpenRegion]:
        """Numbers of stages by the work of each stage."""
        numbers = few_devices(self.problem, stages_of_whole_nodes(self.problem)) if is_large(self.problem) else None
        by_stages = least_by_stages(self.problem, self.counts, numbers)
        relaxation = Relaxation(EQUAL_STAGES, self.problem.policy.effort.work)
        devices, is_uniform = self.problem.cluster.num_devices, len(self.problem.cluster.groups) == 1
        equal = [stages for stages in by_stages if devices % stages == 0] if is_uniform else []
        estimates: _StageEstimates = {}
        per_stage = (0, self.problem.policy.enumeration.least_microbatches_per_stage)
        for stages, seconds in sorted(by_stages.items()):
            # Unequal stages have the estimate of the next numbers of equal ones.
            below = max((s for s in equal if s <= stages), default=0)
            above = min((s for s in equal if s >= stages), default=0)
            near = tuple(sorted({below, above} - {0}))
            region = replace(self._stages(stages), relaxation=relaxation, least_s=seconds, expected_s=seconds)
            yield (
                replace(region, expand=partial(self._by_equal_stages, stages, near, estimates, per_stage))
                if near
                else region
            )

    def _by_equal_stages(
        self, stages: int, near: Sequence[int], estimates: _StageEstimates, per_stage: Sequence[int], known: Known
    ) -> Expansion | Bounded:
        """A number of stages by the whole step on the devices of one of those near it.

        Args:
            stages: their number.
            near: numbers of equal stages that are relaxed.
            estimates: by number of stages; those that are made here are added.
            per_stage: microbatches a stage of this relaxation and of those that follow; 0 for as few as may be.
            known: what was planned.
        """
        for number in near:
            before, here = estimates.get(number), self._count_for(number, per_stage[0])
            if before is None or all(m != here for m, _ in before.estimates):
                before = before or EqualStages.of(self.problem, number, known.mesh)
                after = equal_stages(self.problem, self.step, before, here, known.best_s)
                if after is None:  # in other microbatches the step may be cut
                    return Expansion(regions=(self._stages(stages),))
                estimates[number] = after
        next_regions = tuple(self._planned_next(stages, near, estimates))
        if not next_regions:
            return Bounded(WHOLE_STEP, known.best_s)
        if len(per_stage) == 1:
            return Expansion(regions=next_regions)
        best = min(next_regions, key=lambda region: region.expected_s)
        least_s = min(region.least_s for region in next_regions)
        region = Region.of_stages("pipeline", [stages])
        sharper = partial(self._by_equal_stages, stages, near, estimates, per_stage[1:])
        return Expansion(regions=(replace(best, region=region, least_s=least_s, expand=sharper),))

    def _planned_next(self, stages: int, near: Sequence[int], estimates: _StageEstimates) -> Iterator[OpenRegion]:
        """Regions of a number of stages to be planned: any microbatches, or each of some on a large cluster."""
        left, possible = self.problem.policy.schedules.bubble_left, self._possible
        equal = min(
            (estimates[number] for number in near), key=lambda equal: (equal.least_s(possible, left), equal.stages)
        )
        policy = self.problem.policy
        if equal.is_beyond:
            return
        most = policy.enumeration.most_ranked_per_stage * stages
        some = [m for m in possible if m <= most] or [min(possible)]
        # What unequal stages take longer than equal ones says nothing of equal ones.
        relaxation = Relaxation(WHOLE_STEP if equal.stages == stages else _UNEQUAL, policy.effort.whole_step)
        ranked = sorted(some, key=lambda m: (equal.step_s(m), m))
        if not is_large(self.problem):
            least_s = equal.least_s(possible, left)
            expected_s = equal.step_s(ranked[0])
            # Where fewer microbatches than stages are best, stages hardly run at once: slicings of the fewest are
            # planned, with submeshes as unequal as may be, in place of even stages. Small steps are planned in all.
            best, serial = ranked[0], ranked[0] < stages and not is_small(self.problem)
            region = self._stages(stages, min(possible)) if serial else self._stages(stages, first_count=best)
            yield replace(region, relaxation=relaxation, least_s=least_s, expected_s=expected_s)
            return
        for count in ranked[: policy.partition.most_near]:
            least_s, expected_s = equal.least_s([count], left), equal.step_s(count)
            region = self._stages(stages, count)
            yield replace(region, relaxation=relaxation, least_s=least_s, expected_s=expected_s)
            if self.problem.job.schedule != "auto" or count % stages:
                continue
            for chunks in policy.schedules.ranked_chunks:
                if may_have_stages(self.problem, stages * chunks):
                    yield self._interleaved(equal, count, chunks)

    def _interleaved(self, equal: EqualStages, count: int, chunks: int) -> OpenRegion:
        """``chunks`` stages on each of as many workers as there are equal stages."""
        workers = equal.stages
        seconds = equal.step_s(count, chunks, unevenness(self.problem, workers * chunks))
        schedule = get("interleaved", chunks=chunks)
        job = replace(self.problem.job, num_stages=workers * chunks, schedule=schedule)
        asked = replace(self, problem=replace(self.problem, job=job))
        relaxation = Relaxation(_INTERLEAVED, self.problem.policy.effort.interleaved)
        region = asked._stages(None, count)  # as many as its job says
        return replace(region, relaxation=relaxation, least_s=seconds, expected_s=seconds)

    def _stages(self, stages: int | None, count: int | None = None, first_count: int = 0) -> OpenRegion:
        """Pipelines with a number of stages and of microbatches; None for what the problem says.

        Args:
            stages: their number.
            count: of microbatches.
            first_count: number of microbatches in which pipelines are planned first, where they fit; 0 where no
                relaxation says one.
        """
        job, counts = self.problem.job, self.counts if count is None else [count]

        def expand(known: Known) -> Expansion | Bounded:
            problem = self._below(known, None if stages is None else (stages,), first_count)
            plan = self._several(problem, counts).pipeline()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        schedule = "" if isinstance(job.schedule, str) else job.schedule.name
        microbatches = () if count is None else (count,)
        return OpenRegion(Region("pipeline", self._numbers(stages or job.num_stages), microbatches, schedule), expand)

    def _even(self) -> OpenRegion:
        """Even stages, nothing of which is compared: a plan within seconds, where there is none yet."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._several(self._below(Known()), self.counts).even()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("pipeline", self._numbers(None), how="even stages")
        return OpenRegion(region, expand, only_without=LeftOut("a plan is known"), is_silent=True)

    def branches(self) -> OpenRegion:
        """The region of plans with independent branches side by side."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._several(self._below(known), self.counts).branches()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("branches", self._numbers(self.problem.job.num_stages))
        without, relaxation = self._without_overlap(), self._work
        least_s = self._bound_of_several_s(without)
        return OpenRegion(region, expand, relaxation, least_s, least_s, only_without=without)

    def _numbers(self, stages: int | None) -> tuple[tuple[int, int], ...]:
        """The range of a number of stages; of all where it is None."""
        return ((2, max(2, self.problem.cluster.num_devices)),) if stages is None else ((stages, stages),)

    def _state_too_large(self) -> TooLarge | None:
        """Why no plan fits: all devices together cannot hold the parameters and the state of the optimizer once."""
        problem = self.problem
        if problem.job.offload != "none":
            return None
        state = sum(i.type.nbytes for i in problem.graph.inputs if i.role in ("parameter", "optimizer"))
        least = math.ceil(state / problem.cluster.num_devices)
        missing = least - problem.memory_limit_bytes
        return TooLarge("parameters and optimizer state, shared by all devices", missing) if missing > 0 else None

    @property
    def _one(self) -> OneStagePlanner:
        return OneStagePlanner(self.problem, self.step, self.counts, self.strategy, self.cache)

    def _several(self, problem: Problem, counts: Sequence[int] | None) -> SeveralStages:
        return SeveralStages(problem, self.step, counts, self.strategy, self.cache)

    def _below(self, known: Known, tried: tuple[int, ...] | None = None, first_count: int = 0) -> Problem:
        """The problem of stages that must take less than the best plan."""
        scores = stage_block_scores(self.problem, known.one_stage)
        subproblem = replace(
            self.problem.subproblem,
            cutoff_s=known.best_s,
            tried_stages=tried,
            first_count=first_count,
            block_scores=scores,
        )
        return replace(self.problem, subproblem=subproblem)

    @property
    def _possible(self) -> Sequence[int]:
        """Numbers of microbatches that may be taken, powers of two where all may."""
        return self.counts or even_counts(self.problem.graph)

    def _count_for(self, stages: int, per_stage: int) -> int:
        """The most microbatches that may be taken up to so many a stage; the fewest where all are more."""
        return max((n for n in self._possible if n <= per_stage * stages), default=min(self._possible))

    def _without_overlap(self) -> Outcome | None:
        """Why stages cannot be faster than one: they never run at once, or the caller waits for each step."""
        cluster = self.problem.cluster
        if cluster.num_nodes > 1:
            return None
        if all("cpu" in d.jax_kinds for d in cluster.device_types):
            return Bounded("stages in one process on a CPU do not overlap")
        if not trains(self.problem):
            return Bounded("without a backward pass the caller waits for each step")
        return None

    def _bound_of_several_s(self, only_without: Outcome | None) -> float:
        """`_bound_s` of several stages; 0 where any plan closes their region, as nobody then reads it."""
        return self._bound_s(several=True) if only_without is None else 0.0

    def _bound_s(self, *, several: bool) -> float:
        """Seconds that no plan of one stage, or of several, is below."""
        freedom = Freedom.of(self.problem)
        most = freedom.most_stages if several else 0
        return bound_s(self.problem, replace(freedom, one_stage=not several, most_stages=most))


def few_devices(problem: Problem, every: Sequence[int]) -> Sequence[int]:
    """Numbers of stages with few devices each, where there are some: others have many meshes, each slow to plan."""
    most = problem.policy.enumeration.most_stage_devices
    return [stages for stages in every if problem.cluster.num_devices <= most * stages] or every
