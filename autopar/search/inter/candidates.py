"""Ways to cut a step into stages on submeshes that are worth planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.errors import MicrobatchError, ScheduleError
from autopar.schedule import Schedule, Task, get
from autopar.search.beside import Beside
from autopar.search.inter.costs import LayerPrices, stage_costs
from autopar.search.inter.counts import ways
from autopar.search.inter.dp import Slicing, slice_layers
from autopar.search.inter.even import even_stages
from autopar.search.inter.submesh import placed, worthwhile
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.stages import Layers, cluster

#: Layers that the model is clustered into: so many a stage, and at most so many in all.
LAYERS_PER_STAGE, MOST_LAYERS = 4, 32

#: Operators of a model from which on no layer is less than a block, if there are as many blocks as stages.
LARGE = 4000

#: Times the memory that layers as they are priced may take, until some slicing of them does.
EXCESSES = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0, math.inf)

#: Likewise times less, where none of these slicings was found to fit.
SHORTAGES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Candidate:
    """A way to slice the step: by stage the ids of its forward operators and its devices (first, number).

    ``layers`` has the layers inside the stages, for recomputation; where it is empty each stage is one layer.
    ``meshes`` has by stage the shape of the logical mesh that suits its layers best; empty where that is not known.
    ``schedule`` is the only one that it is for; None takes that of the options.
    """

    count: int
    members: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[int, int], ...]
    estimate_s: float
    layers: tuple[tuple[str, ...], ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()
    schedule: Schedule | None = None


def schedule_of(problem: Problem) -> Schedule:
    """The schedule asked for; 1F1B, for which stages are planned, where it is free."""
    asked = problem.options.schedule
    if isinstance(asked, Schedule):
        return asked
    return get("1f1b" if asked in ("auto", "none") else asked)


def candidates(
    problem: Problem, source: StageSource, fewest: Callable[[int], int] | None, beside: Beside, every: bool
) -> Iterable[Candidate]:
    """Ways to cut the step; ``fewest`` says from how many blocks on they are the layers, None that they never are.

    With ``every`` those too that are the best in more or less memory than there is.
    """
    schedule = schedule_of(problem)
    asked = problem.options.num_microbatches
    for count, stage_counts in ways(problem, schedule):
        try:
            found = source.microbatches(count)
        except MicrobatchError:
            if asked is not None:
                raise
            continue
        known: dict[Layers, LayerPrices] = {}
        for stages in stage_counts:
            wanted = stages * (1 if schedule.chunks > 1 else LAYERS_PER_STAGE)
            most = max(stages, MOST_LAYERS)
            layers = cluster(problem.graph, found, min(wanted, most), fewest=fewest and fewest(stages))
            if len(layers.members) < stages:
                continue
            try:
                schedule.table(stages, count)
            except ScheduleError:
                if problem.options.num_stages is not None and asked is not None:
                    raise
                continue
            even = even_candidate(problem, layers, stages, schedule, count)
            if even is not None:
                yield even
            elif schedule.chunks == 1:
                if layers not in known:
                    known[layers] = LayerPrices(problem, source, count, layers, beside)
                yield from _sliced(known[layers], stages, every)


def fewest_blocks(problem: Problem, stages: int) -> int:
    """Blocks of the model from which on they are the layers: two a stage; of large models one a stage."""
    return stages if len(problem.graph.operators) >= LARGE else 2 * stages


def even_candidate(problem: Problem, layers: Layers, stages: int, schedule: Schedule, count: int) -> Candidate | None:
    """Equal runs of layers on equal submeshes, for schedules that place several stages on a worker."""
    table = schedule.table(stages, count)
    several = any(len(table.workers_of_stage(s)) > 1 for s in range(stages))
    if table.num_workers == stages and not several:
        return None
    per = problem.cluster.num_devices // table.num_workers
    if per * table.num_workers != problem.cluster.num_devices:
        return None
    merged = even_stages(layers, stages)
    homes = tuple((table.worker_of(Task("forward", s, 0)) * per, per) for s in range(stages))
    return Candidate(count, merged, homes, float(sum(layers.flops)), layers.members)


def _sliced(prices: LayerPrices, stages: int, every: bool) -> Iterable[Candidate]:
    """The answer of the dynamic program for a number of stages, or ``every`` one that it has for some memory."""
    problem, layers, count = prices.problem, prices.layers, prices.count
    # Of layers that are alike none wants more than its share of the devices.
    kinds = worthwhile(problem.cluster, stages, 1 if len(set(layers.alike)) * 2 <= len(layers.members) else 2)
    if problem.options.equal:
        kinds = [k for k in kinds if k.size * stages == problem.cluster.num_devices]
    if not kinds:
        return
    costs = stage_costs(prices, kinds)
    devices = [g.size for g in problem.cluster.groups]
    asked = problem.options.memory_limit_bytes
    limits = [asked or g.device.memory_bytes for g in problem.cluster.groups]
    # What stages need is known after they are planned: under a limit they are sharded more than the layers here, which
    # were without one. The less of the limit they exceed, the more likely they fit then.
    answers: dict[tuple[object, ...], Slicing] = {}
    for excess in (*SHORTAGES, *EXCESSES) if every else EXCESSES:
        if every or not answers:
            found = slice_layers(costs, devices, count, [limit * excess for limit in limits], stages)
            if found is not None:
                answers.setdefault(found.stages, found)
    for found in answers.values():
        members = tuple(
            tuple(id for layer in layers.members[x.first : x.last + 1] for id in layer) for x in found.stages
        )
        homes = placed(problem.cluster, [kinds[x.kind] for x in found.stages])
        meshes = tuple(prices.on(kinds[x.kind])[1] for x in found.stages)
        yield Candidate(count, members, homes, found.objective, layers.members, meshes)
