"""Slicings of priced layers into stages, by the dynamic program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from autopar.search.partition.dp import Slicing, can_be_sliced, slice_layers
from autopar.search.partition.submesh import Submesh, of_equal_nodes, worthwhile
from autopar.search.problem import Problem
from autopar.search.profiling.layer_costs import CostsOfLayers, stage_costs
from autopar.search.source import StageSource
from autopar.solver.meter import Work
from autopar.stages import Layers, cluster


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
    return cluster(problem.graph, source.microbatches(count), wanted, fewest=fewest)


def slicings(
    profiler: CostsOfLayers, stages: int, excesses: Sequence[float], every: bool = False
) -> Iterator[tuple[float, Slicing, Sequence[Submesh]]]:
    """(excess, answer of the dynamic program within it, submeshes that its kinds are).

    Args:
        profiler: of the layers.
        stages: their number.
        excesses: times the memory there is that a slicing may take: the first with an answer is.
        every: whether those of all others are too.
    """
    problem, layers = profiler.problem, profiler.layers
    # Of isomorphic layers none wants more than its share of the devices.
    kinds = worthwhile(problem.cluster, stages, 1 if len(set(layers.isomorphic)) * 2 <= len(layers.members) else 2)
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
