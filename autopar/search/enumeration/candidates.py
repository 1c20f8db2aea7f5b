"""Ways to cut a step into stages on submeshes that are worth planning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.errors import MicrobatchError, ScheduleError
from autopar.ir.phases import phase_of
from autopar.microbatch import Microbatching
from autopar.schedule import Schedule, Table, Task, check_barrier, get
from autopar.search.cuttable import CuttableStep
from autopar.search.enumeration.search_space import microbatches_and_stages
from autopar.search.partition.even import even_stages
from autopar.search.partition.slicings import layers_of, slicings
from autopar.search.partition.submesh import placed
from autopar.search.problem import Problem
from autopar.search.profiling.profiler import LayerProfiler
from autopar.search.source import StageSource
from autopar.stages import Layers
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


def schedule_of(problem: Problem) -> Schedule:
    """The schedule asked for; where it is free 1F1B, for which stages are planned, or forwards alone."""
    asked = problem.job.schedule
    if isinstance(asked, Schedule):
        return asked
    return get(("1f1b" if trains(problem) else "inference") if asked in ("auto", "none") else asked)


def schedule_for(problem: Problem, microbatching: Microbatching) -> Schedule:
    """`schedule_of`; GPipe where it is free and examples meet between the forward and the backward passes."""
    if microbatching.between and problem.job.schedule in ("auto", "none"):
        return get("gpipe")
    return schedule_of(problem)


def table_for(schedule: Schedule, stages: int, microbatching: Microbatching) -> Table:
    """The table of a schedule. ScheduleError where there is none, or examples meet and it has no moment for that."""
    table = schedule.table(stages, microbatching.count)
    if microbatching.between:
        check_barrier(table)
    return table


def trains(problem: Problem) -> bool:
    """Whether the step has a backward pass."""
    return any(phase_of(op) == "backward" for op in problem.graph.operators)


def candidates(step: CuttableStep, fewest: Callable[[int], int] | None, every: bool) -> Iterator[Candidate]:
    """Ways to cut the step; ``fewest`` says from how many blocks on they are the layers, None that they never are.

    With ``every`` those too that are the best in more or less memory than there is, or are not expected to be.
    """
    problem, source = step.problem, step.source
    schedule, asked = schedule_of(problem), problem.job.num_microbatches
    for count, numbers in microbatches_and_stages(problem, schedule, every=every):
        try:
            microbatching = source.microbatches(count)
        except MicrobatchError:
            if asked is not None:
                raise
            continue
        schedule_here = schedule_for(problem, microbatching)
        for stages in numbers:
            per_stage = 1 if schedule.chunks > 1 else problem.policy.enumeration.layers_per_stage
            layers = layers_of(problem, source, count, stages, fewest and fewest(stages), per_stage)
            if len(layers.members) < stages:
                continue
            try:
                table_for(schedule_here, stages, microbatching)
            except ScheduleError:
                if problem.job.num_stages is not None and asked is not None:
                    raise
                continue
            even = uniform_candidate(problem, layers, stages, schedule_here, count)
            if even is not None:
                yield even
            elif schedule.chunks == 1:
                yield from _sliced(LayerProfiler(problem, source, count, layers, step.pool), stages, every)


def fewest_blocks(problem: Problem, stages: int) -> int:
    """Blocks of the model from which on they are the layers: two a stage; of large models one a stage."""
    return stages if len(problem.graph.operators) >= problem.policy.sizes.block_operators else 2 * stages


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
            schedule_of(problem).table(len(candidate.members), max(1, count))
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
    table = schedule.table(stages, count)
    if has_stage_a_worker(table):
        return None
    per = problem.cluster.num_devices // table.num_workers
    if per * table.num_workers != problem.cluster.num_devices:
        return None
    merged = even_stages(layers, stages)
    placements = tuple((table.worker_of(Task("forward", s, 0)) * per, per) for s in range(stages))
    return Candidate(count, merged, placements, float(sum(layers.flops)), layers.members)


def _sliced(profiler: LayerProfiler, stages: int, every: bool) -> Iterable[Candidate]:
    """The answer of the dynamic program for a number of stages, or ``every`` one that it has for some memory."""
    problem, layers, count = profiler.problem, profiler.layers, profiler.count
    # What stages need is known after they are planned: under a limit they are sharded more than the layers here, which
    # were without one. The less of the limit they exceed, the more likely they fit then.
    policy = problem.policy.partition
    excesses = (*policy.shortages, *policy.excesses) if every else policy.excesses
    for _, slicing, kinds in slicings(profiler, stages, excesses, every):
        members = tuple(
            tuple(id for layer in layers.members[x.first : x.last + 1] for id in layer) for x in slicing.stages
        )
        placements = placed(problem.cluster, [kinds[x.kind] for x in slicing.stages])
        meshes = tuple(profiler.on(kinds[x.kind])[1] for x in slicing.stages)
        yield Candidate(count, members, placements, slicing.objective, layers.members, meshes)
