"""Ways to cut a step into stages on submeshes that are worth planning: `Candidate` and those who make them.

A tiny step has all of its slicings, for which no estimate is needed; others have those of the dynamic program over
priced layers (`autopar.search.pipeline.partition`).
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.errors import MicrobatchError, ScheduleError
from autopar.ir.phases import phase_of
from autopar.microbatch import Microbatching
from autopar.plan import Plan
from autopar.schedule import Schedule, Table, Task, check_barrier, get, table_of
from autopar.search.outcome import Bounded
from autopar.search.pipeline.partition import (
    Slicing,
    Submesh,
    can_be_sliced,
    even_stages,
    of_equal_nodes,
    placed,
    slice_layers,
    submeshes,
    worthwhile,
)
from autopar.search.pipeline.profiling import CostsOfLayers, LayerProfiler, stage_costs
from autopar.search.pipeline.search_space import microbatch_counts, microbatches_and_stages, microbatchings
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.search.worker_pool import SERIAL, WorkerPool
from autopar.solver.meter import Work
from autopar.stages import Layers, cluster
from autopar.stages.layers import forward_operators


@dataclass(frozen=True)
class Candidate:
    """A slicing of the step: by stage the ids of its forward operators and its devices (first, number).

    ``layers`` has the layers inside the stages, for recomputation; where it is empty each stage is one layer.
    ``meshes`` has by stage the shape of the logical mesh that suits its layers best; empty where that is not known.
    ``schedule`` is the only one that it is for; None takes that of the options. ``shares_plans`` says that isomorphic
    stages have one plan, which fits the stage with the most microbatches in flight, whatever others have room for.
    """

    count: int
    members: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[int, int], ...]
    estimate_s: float
    layers: tuple[tuple[str, ...], ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()
    schedule: Schedule | None = None
    shares_plans: bool = False


@dataclass(frozen=True)
class CuttableStep:
    """A step from which stages are cut.

    Args:
        problem: of the whole step.
        source: cuts it.
        intra: plans one stage on its submesh.
        pool: plans some of them in another process.
    """

    problem: Problem
    source: StageSource
    intra: Callable[[Problem], Plan | Bounded]
    pool: WorkerPool = SERIAL


def schedule_of(problem: Problem) -> Schedule:
    """The schedule asked for; where it is free 1F1B, for which stages are planned, or forwards alone."""
    asked = problem.job.schedule
    if isinstance(asked, Schedule):
        return asked
    return get(("1f1b" if trains(problem) else "inference") if asked in ("auto", "none") else asked)


def schedule_for(problem: Problem, microbatching: Microbatching) -> Schedule:
    """The schedule that is asked for; where it is free 1F1B, or GPipe if all examples meet between the two passes.

    Examples meet in statistics of the whole batch, which no schedule has that begins a backward pass early.
    """
    if microbatching.between and problem.job.schedule in ("auto", "none"):
        return get("gpipe")
    return schedule_of(problem)


def check_for(schedule: Schedule, stages: int, microbatching: Microbatching) -> None:
    """Raises ScheduleError where `table_for` does; the table is made only where examples meet."""
    if microbatching.between:
        table_for(schedule, stages, microbatching)
    else:
        schedule.check(stages, microbatching.count)


def table_for(schedule: Schedule, stages: int, microbatching: Microbatching) -> Table:
    """The table of a schedule. ScheduleError where there is none, or examples meet and it has no moment for that."""
    table = table_of(schedule, stages, microbatching.count)
    if microbatching.between:
        check_barrier(table)
    return table


def trains(problem: Problem) -> bool:
    """Whether the step has a backward pass."""
    return any(phase_of(op) == "backward" for op in problem.graph.operators)


def candidates(step: CuttableStep, of_blocks: bool, every: bool) -> Iterator[Candidate]:
    """Ways to cut the step.

    Args:
        step: what is cut.
        of_blocks: whether whole blocks are layers where there are as many as stages; of fewer than two a stage, runs of
            equal FLOPs are as well.
        every: whether those are wanted too that are the best in more or less memory than there is, or are not expected
            to be.
    """
    problem, source = step.problem, step.source
    schedule, asked = schedule_of(problem), problem.job.num_microbatches
    for count, numbers in microbatches_and_stages(problem, schedule, every=every):
        microbatching = next(microbatchings(problem, source, [count]), None)
        if microbatching is None:
            continue
        schedule_here = schedule_for(problem, microbatching)
        for stages in numbers:
            per_stage = 1 if schedule.chunks > 1 else problem.policy.enumeration.layers_per_stage
            fewest = (stages, 2 * stages) if of_blocks else (None,)
            layerings = [layers_of(problem, source, count, stages, blocks, per_stage) for blocks in fewest]
            layerings = [x for n, x in enumerate(layerings) if len(x.members) >= stages and x not in layerings[:n]]
            if not layerings:
                continue
            try:
                check_for(schedule_here, stages, microbatching)
            except ScheduleError:
                if problem.job.num_stages is not None and asked is not None:
                    raise
                continue
            for layers in layerings:
                even = uniform_candidate(problem, layers, stages, schedule_here, count)
                if even is not None:
                    yield even
                elif schedule.chunks == 1:
                    yield from _sliced(LayerProfiler(problem, source, count, layers, step.pool), stages, every)


def in_other_microbatches(problem: Problem, source: StageSource, candidate: Candidate) -> Iterator[Candidate]:
    """A slicing in half and in twice as many microbatches, as far as the step can be cut so.

    Args:
        problem: what is planned.
        source: cuts its step.
        candidate: the slicing.
    """
    operators = {id for members in candidate.members for id in members}
    for count in (candidate.count // 2, 2 * candidate.count):
        with contextlib.suppress(MicrobatchError, ScheduleError):
            schedule_of(problem).check(len(candidate.members), max(1, count))
            if {op.id for op in forward_operators(problem.graph, source.microbatches(max(1, count)))} == operators:
                yield replace(candidate, count=max(1, count))


def has_stage_a_worker(table: Table) -> bool:
    """Whether every worker has one stage and every stage one worker."""
    return table.num_workers == table.num_stages and all(
        len(table.workers_of_stage(s)) == 1 for s in range(table.num_stages)
    )


def uniform_candidate(
    problem: Problem, layers: Layers, stages: int, schedule: Schedule, count: int
) -> Candidate | None:
    """Equal runs of layers on equal submeshes, for schedules that place several stages on a worker."""
    table = table_of(schedule, stages, count)
    if has_stage_a_worker(table):
        return None
    per = problem.cluster.num_devices // table.num_workers
    if per * table.num_workers != problem.cluster.num_devices:
        return None
    merged = even_stages(layers, stages)
    placements = tuple((table.worker_of(Task("forward", s, 0)) * per, per) for s in range(stages))
    return Candidate(count, merged, placements, float(sum(layers.flops)), layers.recomputed)


def _sliced(profiler: LayerProfiler, stages: int, every: bool) -> Iterable[Candidate]:
    """The answer of the dynamic program for a number of stages, or ``every`` one that it has for some memory."""
    problem, layers, count = profiler.problem, profiler.layers, profiler.count
    # What stages need is known after they are planned: under a limit they are sharded more than the layers here, which
    # were without one. The less of the limit they exceed, the more likely they fit then.
    policy = problem.policy.partition
    multiples = [m for m in policy.multiples if every or m >= 1]
    for _, slicing, kinds in slicings(profiler, stages, multiples, every):
        members = tuple(
            tuple(id for layer in layers.members[x.first : x.last + 1] for id in layer) for x in slicing.stages
        )
        placements = placed(problem.cluster, [kinds[x.kind] for x in slicing.stages])
        meshes = tuple(profiler.on(kinds[x.kind])[1] for x in slicing.stages)
        yield Candidate(count, members, placements, slicing.objective, layers.recomputed, meshes)


def layers_of(
    problem: Problem,
    source: StageSource,
    count: int,
    stages: int,
    fewest: int | None,
    per_stage: int | None = None,
) -> Layers:
    """The layers that stages are made of.

    Args:
        problem: what is planned.
        source: cuts its step.
        count: number of microbatches.
        stages: their number.
        fewest: from how many blocks on they are the layers; None that they never are.
        per_stage: layers a stage; None takes the policy's.

    Raises:
        MicrobatchError: the step cannot be cut into so many.
    """
    policy = problem.policy.enumeration
    wanted = min(stages * (per_stage or policy.layers_per_stage), max(stages, policy.most_layers))
    return cluster(problem.graph, source.microbatches(count), wanted, fewest=fewest, stages=stages)


def slicings(
    profiler: CostsOfLayers, stages: int, excesses: Sequence[float], every: bool = False
) -> Iterator[tuple[float, Slicing, Sequence[Submesh]]]:
    """Slicings by the dynamic program, each within a multiple of the memory: (multiple, slicing, its kinds of submesh).

    Args:
        profiler: of the layers.
        stages: their number.
        excesses: multiples of a device's memory; the first with a slicing is taken.
        every: whether slicings of all other multiples are taken too.
    """
    problem, layers = profiler.problem, profiler.layers
    # Of isomorphic layers none wants more than its share of the devices, unless one is more than a stage's share.
    isomorphic = len(set(layers.isomorphic)) * 2 <= len(layers.members)
    even = isomorphic and max(layers.flops) * stages <= sum(layers.flops)
    kinds = worthwhile(problem.cluster, stages, 1 if even else 2)
    if problem.subproblem.uniform_stages:
        kinds = of_equal_nodes(problem.cluster, kinds, stages)
    if not kinds:
        return
    costs = stage_costs(profiler, kinds)
    problem.meter.add(Work.SLICED, costs.seconds.size * (1 + len(costs.others)))
    devices = [g.size for g in problem.cluster.groups]
    asked = problem.job.memory_limit_bytes
    limits = [asked or g.device.memory_bytes for g in problem.cluster.groups]
    answers: dict[tuple[object, ...], tuple[float, Slicing]] = {}

    def can(excess: float) -> bool:
        return can_be_sliced(costs, devices, profiler.count, [limit * excess for limit in limits], stages)

    for excess in excesses if every else first_of(excesses, can):
        slicing = slice_layers(costs, devices, profiler.count, [limit * excess for limit in limits], stages)
        if slicing is not None:
            answers.setdefault(slicing.stages, (excess, slicing))
    for excess, slicing in answers.values():
        yield excess, slicing, kinds


def first_of(excesses: Sequence[float], can: Callable[[float], bool]) -> Sequence[float]:
    """The first of rising excesses with an answer; none where the last has none, for what fits in less fits in more."""
    if can(excesses[0]):  # as it mostly is
        return excesses[:1]
    return excesses[bisect_left(excesses, True, key=can) :][:1] if can(excesses[-1]) else ()


def all_slicings(problem: Problem, source: StageSource) -> list[Candidate] | None:
    """All cuts of a tiny step, with all submeshes, in all numbers of microbatches and stages that may be taken.

    Args:
        problem: what is planned.
        source: cuts its step.

    Returns None where the step is not tiny, there are too many slicings, or the schedule gives a worker several stages.

    Raises:
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        ScheduleError: the schedule that was asked for cannot run the numbers that were.
    """
    if len(problem.graph.operators) > problem.policy.sizes.tiny_operators:
        return None
    candidates: list[Candidate] = []
    for candidate in _every(problem, source):
        candidates.append(candidate)
        if len(candidates) > problem.policy.enumeration.most_slicings:
            return None
    return candidates or None


def _every(problem: Problem, source: StageSource) -> Iterator[Candidate]:
    schedule, job, policy = schedule_of(problem), problem.job, problem.policy.enumeration
    if schedule.chunks > 1:
        return
    counts = [job.num_microbatches] if job.num_microbatches is not None else microbatch_counts(problem)
    for microbatching in microbatchings(problem, source, counts):
        count = microbatching.count
        clustered = cluster(problem.graph, microbatching, policy.most_layers, stages=job.num_stages or 2)
        layers = clustered.members
        most = min(len(layers), problem.cluster.num_devices)
        for stages in [job.num_stages] if job.num_stages is not None else range(2, most + 1):
            try:
                table = table_for(schedule_for(problem, microbatching), stages, microbatching)
            except ScheduleError:
                if job.num_stages is not None and job.num_microbatches is not None:
                    raise
                continue
            if not has_stage_a_worker(table):
                return
            some = itertools.islice(submeshes_of_all(problem, stages), policy.most_slicings + 1)
            placements = [placed(problem.cluster, kinds) for kinds in some]
            for cut in itertools.combinations(range(1, len(layers)), stages - 1):
                runs = [layers[a:b] for a, b in itertools.pairwise((0, *cut, len(layers)))]
                members = tuple(tuple(id for layer in run for id in layer) for run in runs)
                for placement in placements:
                    yield Candidate(count, members, placement, 0.0, clustered.recomputed)


def submeshes_of_all(problem: Problem, stages: int) -> Iterator[tuple[Submesh, ...]]:
    """Submeshes of so many stages that together are all devices."""
    kinds = submeshes(problem.cluster)
    if problem.subproblem.uniform_stages:
        kinds = of_equal_nodes(problem.cluster, kinds, stages)
    yield from _filling(tuple(group.size for group in problem.cluster.groups), kinds, stages)


def _filling(left: tuple[int, ...], kinds: Sequence[Submesh], stages: int) -> Iterator[tuple[Submesh, ...]]:
    """Sequences of ``stages`` submeshes that take all devices that are ``left`` of each group."""
    largest = max((k.size for k in kinds), default=0)

    def rests(left: tuple[int, ...]) -> Iterator[tuple[Submesh, tuple[int, ...]]]:
        for kind in kinds:
            if kind.size <= left[kind.group]:
                yield kind, tuple(n - kind.size * (g == kind.group) for g, n in enumerate(left))

    @cache
    def is_possible(left: tuple[int, ...], stages: int) -> bool:
        if not stages or not stages <= sum(left) <= largest * stages:
            return not stages and not any(left)
        return any(is_possible(rest, stages - 1) for _, rest in rests(left))

    def sequences(left: tuple[int, ...], stages: int) -> Iterator[tuple[Submesh, ...]]:
        if not stages:
            yield ()
            return
        for kind, rest in rests(left):
            if is_possible(rest, stages - 1):
                for others in sequences(rest, stages - 1):
                    yield kind, *others

    if is_possible(left, stages):
        yield from sequences(left, stages)
