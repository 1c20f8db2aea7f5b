"""`StageRegions`: the regions of plans with several stages, and how each is divided or planned.

Numbers of workers with one stage each, and with two, are ranked by the work of the stages, then by the whole step on
the devices of one of them, then planned (`autopar.search.pipeline.search`); where stages are whole nodes by
microbatches too. Seconds that two kinds of region are expected to take are corrected apart.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

from autopar.cost import LeastWork
from autopar.errors import ScheduleError
from autopar.microbatch import even_counts
from autopar.plan import StepForm
from autopar.schedule import get
from autopar.schedule.zero_bubble import bubble_left
from autopar.search.bound import least_of
from autopar.search.loop import Expansion, Known, OpenRegion, Relaxation
from autopar.search.outcome import Bounded, LeftOut, Outcome
from autopar.search.pipeline.candidates import schedule_of, trains
from autopar.search.pipeline.search_space import (
    is_large,
    is_small,
    may_have_stages,
    stage_counts,
    stages_of_whole_nodes,
    unevenness,
)
from autopar.search.pipeline.whole_steps import WHOLE_STEP, EqualStages, equal_stages
from autopar.search.problem import Problem
from autopar.search.registry import cuts_stages
from autopar.search.several_stages import SeveralStages
from autopar.search.step_problem import StepProblem
from autopar.search.sure_work import sure_works
from autopar.search.techniques import block_scores, stage_block_scores
from autopar.search.trail import Region

#: Name of a relaxation, as the trail has it.
WORK = "the bound of what is computed"
#: What closes a number of stages, in words.
EQUAL_STAGES = "equal stages that send nothing, an estimate"
#: Relaxations by number of stages.
_StageEstimates: TypeAlias = dict[int, EqualStages]
_UNEQUAL = "the whole step on the devices of one of nearly as many equal stages with the bubble, an estimate"
_INTERLEAVED = "interleaved stages by the whole step on the devices of one worker, an estimate"


def least_by_stages(
    problem: Problem, counts: Sequence[int] | None, numbers: Sequence[int] | None = None
) -> dict[int, tuple[float, float]]:
    """Seconds of the best equal pipeline, and of the update of one of its stages, by number of stages.

    Only of those that may run in some number of microbatches.

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

    seconds: dict[int, tuple[float, float]] = {}
    schedule, left = schedule_of(problem), bubble_left()
    for stages in stage_counts(problem, schedule) if numbers is None else numbers:
        devices = cluster.num_devices / stages
        own_s = each_s(devices, True) / stages
        for count in possible:
            try:
                schedule.check(stages, count)
            except ScheduleError:
                continue
            busy_s = each_s(devices * count, False) * (count + (stages - 1) * left)
            step_s = busy_s / stages + own_s + 2 * (stages - 1) * latency_s
            seconds[stages] = min((step_s, own_s), seconds.get(stages, (step_s, own_s)))
    return seconds


@dataclass(frozen=True)
class _Workers:
    """A number of workers, each with as many stages.

    Args:
        number: of workers.
        chunks: stages on each.
        near: numbers of equal stages that are relaxed in its place.
        updates_s: by number of stages, seconds of the update of one of them.
        estimates: by number of stages, of all regions of a search.
    """

    number: int
    chunks: int
    near: Sequence[int]
    updates_s: Mapping[int, float]
    estimates: _StageEstimates


def by_work() -> Relaxation:
    """The relaxation that knows no more of a region than what any of its plans computes."""
    return Relaxation(WORK)


def numbers_of(problem: Problem, stages: int | None) -> tuple[tuple[int, int], ...]:
    """The range of a number of stages; of all where it is None."""
    return ((2, max(2, problem.cluster.num_devices)),) if stages is None else ((stages, stages),)


class StageRegions(StepProblem):
    """Enumerates the regions of plans with several stages of one problem."""

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

        least_s, relaxation = self._bound_s(only_without), by_work()
        region = Region("pipeline", numbers_of(self.problem, None))
        return OpenRegion(region, expand, relaxation, least_s, least_s, only_without=only_without)

    def _by_work(self) -> Iterator[OpenRegion]:
        """Numbers of stages by the work of each stage."""
        numbers = stages_of_whole_nodes(self.problem) if is_large(self.problem) else None
        by_stages = least_by_stages(self.problem, self.counts, numbers)
        relaxation = Relaxation(EQUAL_STAGES)
        devices, is_uniform = self.problem.cluster.num_devices, len(self.problem.cluster.groups) == 1
        equal = [stages for stages in by_stages if devices % stages == 0] if is_uniform else []
        estimates: _StageEstimates = {}
        updates_s = {stages: update_s for stages, (_, update_s) in by_stages.items()}
        for stages, (seconds, _) in sorted(by_stages.items()):
            # Unequal stages have the estimate of the next numbers of equal ones.
            below = max((s for s in equal if s <= stages), default=0)
            above = min((s for s in equal if s >= stages), default=0)
            near = tuple(sorted({below, above} - {0}))
            for chunks in self._chunks_of(stages):
                workers = _Workers(stages, chunks, near, updates_s, estimates)
                region = replace(self._on(workers), relaxation=relaxation, least_s=seconds, expected_s=seconds)
                sharper = partial(self._by_equal_stages, workers, True)
                yield replace(region, expand=sharper) if near else region

    def _chunks_of(self, workers: int) -> tuple[int, ...]:
        """Numbers of stages on each of so many workers, of regions of their own."""
        problem = self.problem
        is_free = problem.job.schedule == "auto" and problem.cluster.num_devices % workers == 0
        return (1, 2) if is_free and not is_large(problem) and unevenness(problem, 2 * workers) < math.inf else (1,)

    def _on(self, workers: _Workers) -> OpenRegion:
        """All plans of a number of workers with so many stages each."""
        return self._stages(workers.number) if workers.chunks == 1 else self._two_a_worker(workers.number)

    def _by_equal_stages(self, workers: _Workers, in_fewest: bool, known: Known) -> Expansion | Bounded:
        """A number of workers by the whole step on the devices of one of those near it.

        Args:
            workers: the number, and estimates, to which those that are made here are added.
            in_fewest: whether the relaxation is in as few microbatches as may be; one in as many as stages follows it.
            known: what was planned.
        """
        for number in workers.near:
            before = workers.estimates.get(number)
            if before is None:
                before = EqualStages.of(self.problem, number, known.mesh, workers.updates_s.get(number, 0.0))
            after = self._relaxed(
                before, min(self.possible_counts) if in_fewest else self._count_for(number), known.best_s
            )
            if after is None:  # in other microbatches the step may be cut
                return Expansion(regions=(self._on(workers),))
            workers.estimates[number] = after
        next_regions = tuple(self._planned_next(workers) if workers.chunks == 1 else self._two_planned_next(workers))
        if not next_regions:
            return Bounded(WHOLE_STEP, known.best_s)
        if not in_fewest:
            return Expansion(regions=next_regions)
        best = min(next_regions, key=lambda region: region.expected_s)
        least_s = min(region.least_s for region in next_regions)
        sharper = partial(self._by_equal_stages, workers, False)
        return Expansion(regions=(replace(best, region=self._on(workers).region, least_s=least_s, expand=sharper),))

    def _relaxed(self, equal: EqualStages, count: int, cutoff_s: float) -> EqualStages | None:
        """Equal stages with a further relaxation in ``count`` microbatches.

        Where so many take longer than a cutoff, it is in the next number after those that were relaxed, so that two say
        how seconds grow. None where the step cannot be cut so.
        """
        most = max((m for m, _ in equal.estimates), default=0)
        above = [m for m in self.possible_counts if most < m <= count]
        for m in dict.fromkeys([*above[-1:], *above[:1]]):
            after = equal_stages(self.problem, self.step, equal, StepForm(m), cutoff_s)
            if after is None or m < after.beyond:
                return after
            equal = after
        return equal

    def _planned_next(self, workers: _Workers) -> Iterator[OpenRegion]:
        """Regions of a number of stages to be planned: any microbatches, or each of some on a large cluster."""
        left, policy = bubble_left(), self.problem.policy
        stages, near = workers.number, [workers.estimates[number] for number in workers.near]
        some_equal = [(equal, equal.within(self.possible_counts)) for equal in near]
        equal, possible = min(some_equal, key=lambda some: (some[0].least_s(some[1], left), some[0].stages))
        if equal.is_beyond:
            return
        # What unequal stages take longer than equal ones says nothing of equal ones, which say something of them; what
        # equal ones take longer, which may wait for each other, says nothing of two on each worker.
        name, like = (WHOLE_STEP, _INTERLEAVED) if equal.stages == stages else (_UNEQUAL, WHOLE_STEP)
        relaxation = Relaxation(name, policy.effort.step_spread, like)
        ranked = sorted(self._ranked_counts(possible, stages), key=lambda m: (equal.step_s(m), m))
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

    def _two_planned_next(self, workers: _Workers) -> Iterator[OpenRegion]:
        """The region of two stages on each of so many workers, in the microbatches in which they are the fastest."""
        stages, equal = workers.number, workers.estimates[workers.number]
        if equal.is_beyond:
            return
        uneven, possible = unevenness(self.problem, 2 * stages, 2, folds=True), equal.within(self.possible_counts)
        expected_s, count = min((equal.step_s(m, 2, uneven), m) for m in self._ranked_counts(possible, stages))
        least_s = equal.least_s(possible, bubble_left())
        relaxation = Relaxation(_INTERLEAVED, self.problem.policy.effort.step_spread)
        region = self._two_a_worker(stages, count)
        yield replace(region, relaxation=relaxation, least_s=least_s, expected_s=expected_s)

    def _two_a_worker(self, workers: int, count: int = 0) -> OpenRegion:
        """Pipelines with two stages on each worker.

        Args:
            workers: their number.
            count: number of microbatches; 0 for one a stage, or as many as may be.
        """
        count = count or self._count_for(2 * workers)

        def expand(known: Known) -> Expansion | Bounded:
            problem = self._below(known, (workers,), count)
            problem = replace(problem, subproblem=replace(problem.subproblem, stages_per_worker=2))
            plan = self._several(problem, self.counts).pipeline()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        stages = (2 * workers, 2 * workers)
        return OpenRegion(Region("pipeline", (stages,), (count,), how="two stages on each worker"), expand)

    def _interleaved(self, equal: EqualStages, count: int, chunks: int) -> OpenRegion:
        """``chunks`` stages on each of as many workers as there are equal stages."""
        workers = equal.stages
        uneven = unevenness(self.problem, workers * chunks, chunks)
        least_s = replace(equal, start_s=0.0).step_s(count, chunks, uneven)
        expected_s = equal.step_s(count, chunks, uneven)
        schedule = get("interleaved", chunks=chunks)
        job = replace(self.problem.job, num_stages=workers * chunks, schedule=schedule)
        asked = replace(self, problem=replace(self.problem, job=job))
        relaxation = Relaxation(_INTERLEAVED, self.problem.policy.effort.step_spread)
        region = asked._stages(None, count)  # as many as its job says
        return replace(region, relaxation=relaxation, least_s=least_s, expected_s=expected_s)

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
        microbatches, numbers = () if count is None else (count,), numbers_of(self.problem, stages or job.num_stages)
        return OpenRegion(Region("pipeline", numbers, microbatches, schedule), expand)

    def even(self) -> OpenRegion:
        """Even stages, nothing of which is compared: a plan within seconds, where there is none yet."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._several(self._below(Known()), self.counts).even()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("pipeline", numbers_of(self.problem, None), how="even stages")
        return OpenRegion(region, expand, only_without=LeftOut("a plan is known"), is_silent=True)

    def branches(self) -> OpenRegion:
        """The region of plans with independent branches side by side."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._several(self._below(known), self.counts).branches()
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("branches", numbers_of(self.problem, self.problem.job.num_stages))
        without, relaxation = self.without_overlap(), by_work()
        least_s = self._bound_s(without)
        return OpenRegion(region, expand, relaxation, least_s, least_s, only_without=without)

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

    def _count_for(self, stages: int) -> int:
        """The most microbatches that may be taken up to one a stage; the fewest where all are more."""
        return max((n for n in self.possible_counts if n <= stages), default=min(self.possible_counts))

    def _ranked_counts(self, possible: Sequence[int], stages: int) -> list[int]:
        """Numbers of microbatches of so many stages that are ranked; the fewest where all are more."""
        most = self.problem.policy.enumeration.most_microbatches_per_stage * stages
        return [m for m in possible if m <= most] or [min(possible)]

    def without_overlap(self) -> Outcome | None:
        """Why stages cannot be faster than one: they never run at once, or the caller waits for each step."""
        cluster = self.problem.cluster
        if cluster.num_nodes > 1:
            return None
        if all("cpu" in d.jax_kinds for d in cluster.device_types):
            return Bounded("stages in one process on a CPU do not overlap")
        if not trains(self.problem):
            return Bounded("without a backward pass the caller waits for each step")
        return None

    def _bound_s(self, only_without: Outcome | None) -> float:
        """Seconds that no plan of several stages is below; 0 where any plan closes their region, as nobody reads it."""
        return least_of(self.problem, several=True) if only_without is None else 0.0
