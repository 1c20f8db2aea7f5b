"""Numbers of stages and of microbatches that are worth trying."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from autopar.cost import total_flops
from autopar.errors import MicrobatchError
from autopar.ir import Graph
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import reads_fused
from autopar.microbatch import Microbatching, batch_size, even_counts
from autopar.schedule import Schedule
from autopar.search.pipeline.partition import even_ends
from autopar.search.problem import Problem
from autopar.search.source import StageSource


def is_small(problem: Problem) -> bool:
    """Whether a step is so small that more pairs of stages and microbatches are planned exactly."""
    return len(problem.graph.operators) < problem.policy.sizes.small_operators


def is_of_few_operators(problem: Problem) -> bool:
    """Whether a step is so small that most pairs of stages and microbatches are planned exactly."""
    return len(problem.graph.operators) < problem.policy.sizes.few_operators


def is_large(problem: Problem) -> bool:
    """Whether the cluster has so many nodes that stages are whole nodes of it."""
    cluster = problem.cluster
    return cluster.num_nodes > problem.policy.sizes.large_nodes and len(cluster.groups) == 1


def microbatchings(problem: Problem, source: StageSource, counts: Iterable[int]) -> Iterator[Microbatching]:
    """The step in each of some numbers of microbatches, but for those into which it cannot be cut.

    Args:
        problem: what is planned.
        source: cuts its step.
        counts: numbers of microbatches.

    Raises:
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    for count in counts:
        try:
            yield source.microbatches(count)
        except MicrobatchError:
            if problem.job.num_microbatches is not None:
                raise


def microbatches_and_stages(
    problem: Problem, schedule: Schedule, *, every: bool = False
) -> Iterator[tuple[int, list[int]]]:
    """Numbers of microbatches, each with the numbers of stages that are tried with it.

    Args:
        problem: what is planned.
        schedule: of the pipeline.
        every: whether a step of many operators has others than the number that a relaxation expects to be the fastest.
    """
    asked = problem.job.num_microbatches
    stages = stage_counts(problem, schedule)
    if asked is None and problem.job.num_stages is None and is_large(problem):
        for s in stages:
            yield most_microbatches(problem, problem.policy.enumeration.most_microbatches_per_stage * s), [s]
        return
    expected = problem.subproblem.first_count
    if asked is None and expected and schedule.chunks == 1 and not (every or is_of_few_operators(problem)):
        yield expected, stages
        return
    for count in [asked] if asked is not None else microbatch_counts(problem):
        yield count, stages


def loops_over_layers(graph: Graph) -> int:
    """Isomorphic loops of the forward pass, groups of layers that were split; of one loop its trips; 0 without any."""
    loops = [op for op in graph.operators if op.primitive == "scan" and phase_of(op) == "forward"]
    isomorphic = Counter((Scan.of(op).length, len(op.operands), len(op.results)) for op in loops)
    groups = max(isomorphic.values(), default=0)
    return groups if groups != 1 else max(Scan.of(op).length for op in loops)


def microbatch_counts(problem: Problem) -> list[int]:
    """Numbers of microbatches worth trying: powers of two that divide the batch, one a stage and a few.

    Of small models, which are planned in no time, fewer as well: they may be bound by the latency of links.
    """
    stages = problem.job.num_stages or 2
    most = problem.policy.enumeration.most_microbatches_per_stage * stages
    counts = even_counts(problem.graph)
    fitting = [n for n in counts if stages <= n <= most] or counts[-1:]
    few = [n for n in counts if n <= fitting[-1]] if is_of_few_operators(problem) else []
    return sorted({fitting[0], fitting[-1], *few})


def most_microbatches(problem: Problem, limit: int) -> int:
    """The largest divisor of the batch up to ``limit``."""
    size = batch_size(problem.graph) or 1
    return max(n for n in range(1, limit + 1) if size % n == 0)


def stage_counts(problem: Problem, schedule: Schedule) -> list[int]:
    """Numbers of stages worth trying: what was asked for, or a few that share the devices evenly."""
    asked = problem.job.num_stages
    if asked is not None:
        return [asked]
    devices = problem.cluster.num_devices
    tried = problem.subproblem.tried_stages
    if is_large(problem):
        worker_counts = stages_of_whole_nodes(problem)
        if tried is None:
            worker_counts = worker_counts[-1:]  # the fewest devices a stage
    else:
        worker_counts = [2**k for k in range(1, devices.bit_length()) if devices % 2**k == 0]
        if is_of_few_operators(problem):
            few = range(2, min(devices, problem.policy.enumeration.most_stages_of_few) + 1)
            worker_counts = sorted({*worker_counts, *few})
    return [s * schedule.chunks for s in worker_counts if tried is None or s * schedule.chunks in tried]


def unevenness(problem: Problem, stages: int, chunks: int = 1, *, folds: bool = False) -> float:
    """Estimate of the heaviest worker's share of the forward pass, as a ratio (>= 1) to an equal share.

    Of one stage on each it is a lower bound. Layers of loops are not cut. Without loops operators are cut in running
    order, and too few of them give infinity.

    Args:
        problem: the step.
        stages: number of stages, of which worker k of W has k, k + W, ...
        chunks: stages on each worker.
        folds: whether every second chunk may be dealt out backwards as well, as in a "V" of two.
    """
    graph, blocks = problem.graph, loops_over_layers(problem.graph)
    if blocks and blocks < stages:
        return stages / blocks
    if blocks:
        heavy = np.ones(blocks)
    else:
        forward = (op for op in graph.operators if phase_of(op) == "forward" and not reads_fused(op))
        flops = np.array([total_flops(graph, op) for op in forward])
        heavy = flops[flops > 0]
    if heavy.size < stages:
        return math.inf
    sums = np.concatenate([[0.0], np.cumsum(heavy)])
    runs = np.diff(sums[[0, *even_ends(heavy.tolist(), stages)]]).reshape(chunks, stages // chunks)
    folded = np.array([row[::-1] if k % 2 else row for k, row in enumerate(runs)])
    heaviest = min(float(r.sum(axis=0).max()) for r in ([runs, folded] if folds else [runs]))
    return stages // chunks * heaviest / float(sums[-1])


def may_have_one_loop(problem: Problem, stages: int) -> bool:
    """Whether stages with as many trips each of the loop over layers are as even as stages of single layers.

    Where their number divides the trips, and less than a trip is computed before and after the loop. Stages on unequal
    devices, and steps in which each layer is recomputed for itself, are cut by single layers.

    Args:
        problem: the step.
        stages: on all workers together.
    """
    forward = [op for op in problem.graph.operators if phase_of(op) == "forward" and not reads_fused(op)]
    flops = [total_flops(problem.graph, op) for op in forward]
    loops = [n for n, op in enumerate(forward) if op.primitive == "scan"]
    if len(problem.cluster.groups) > 1 or problem.job.remat != "auto" or len(loops) != 1:
        return False
    (at,) = loops
    trips = Scan.of(forward[at]).length
    return trips % stages == 0 and trips * max(sum(flops[:at]), sum(flops[at + 1 :])) < flops[at]


def may_have_stages(problem: Problem, stages: int) -> bool:
    """Whether so many stages on a large cluster are even enough.

    Args:
        problem: what is planned.
        stages: on all workers together.
    """
    policy = problem.policy.enumeration
    most = policy.most_uneven if loops_over_layers(problem.graph) else policy.most_uneven_runs
    return unevenness(problem, stages) <= most


def stages_of_whole_nodes(problem: Problem) -> list[int]:
    """Numbers of stages on a large cluster: whole nodes each, nearly equal shares of layers."""
    nodes = problem.cluster.num_nodes
    return [s for s in range(2, nodes + 1) if nodes % s == 0 and may_have_stages(problem, s)]
