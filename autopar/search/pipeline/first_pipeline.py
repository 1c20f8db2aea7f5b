"""The first pipeline of a large step: even stages on the mesh that is most like the machine, in what first fits.

Nothing is ranked, priced or compared for it, so that a plan is known within seconds of the search's beginning, which
others have to stay below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.microbatch import batch_size
from autopar.plan import Plan
from autopar.search.clock import Clock
from autopar.search.outcome import Bounded
from autopar.search.pipeline.candidates import (
    Candidate,
    CuttableStep,
    has_stage_a_worker,
    layers_of,
    schedule_for,
    schedule_of,
    table_for,
)
from autopar.search.pipeline.partition import even_stages
from autopar.search.pipeline.relaxed_pipelines import RelaxedPipelines, relaxed_pipeline
from autopar.search.pipeline.search_space import is_small, most_microbatches, stage_counts
from autopar.search.pipeline.whole_steps import by_likeness
from autopar.search.problem import Problem
from autopar.search.source import StageSource


def first_pipeline(problem: Problem, intra: Callable[[Problem], Plan | Bounded]) -> Plan:
    """The first even pipeline that fits.

    Args:
        problem: what is planned; it has a source.
        intra: plans one stage on its submesh.

    Raises:
        InfeasiblePlanError: none of those that are tried fits, or none is tried.
    """
    first = None if problem.source is None else first_plan(CuttableStep(problem, problem.source, intra), Clock())
    if first is None:
        raise InfeasiblePlanError(f"no even stages of {problem.graph.name} fit {problem.cluster.name} at once")
    return first[0]


def first_plan(step: CuttableStep, clock: Clock) -> tuple[Plan, Candidate] | None:
    """The first even pipeline that fits, with what it is of; None where none of those that are tried does.

    Args:
        step: the whole.
        clock: takes the time.
    """
    problem = step.problem
    if not may_be_even(problem):
        return None
    with clock.phase("first plan"):
        for candidate in even_candidates(problem, step.source):
            try:
                plan = relaxed_pipeline(step, candidate, any_that_fits=True)
            except InfeasiblePlanError:
                continue
            if plan is not None:
                return plan, replace(candidate, schedule=None)
    return None


def may_be_even(problem: Problem) -> bool:
    """Whether a first pipeline is planned: of a large step whose number of stages or microbatches is free."""
    job = problem.job
    free = job.num_stages is None or job.num_microbatches is None
    asked = job.schedule != "auto" or job.shared_stages is not None or problem.names_pipeline
    return free and not asked and len(problem.cluster.groups) == 1 and not is_small(problem)


def fastest_of_equal_stages(relaxed: RelaxedPipelines) -> tuple[Plan, Candidate] | None:
    """The fastest of a first pipeline and of those that are near it; None where there is none, or its stages differ.

    Args:
        relaxed: with the first pipeline; those that are relaxed here are added.
    """
    first = relaxed.fastest()
    if first is None or not has_equal_stages(relaxed.step.source, first[1]):
        return None
    others = other_even_candidates(relaxed.step.problem, relaxed.step.source, first[1])
    relaxed.add(others, relaxed.step.problem.policy.effort.least_gain)
    relaxed.climb()
    return relaxed.fastest()


def has_equal_stages(source: StageSource, candidate: Candidate) -> bool:
    """Whether all stages of a candidate but the first and the last, two or more, are isomorphic.

    Args:
        source: cuts the step.
        candidate: stages.
    """
    kinds = source.slice(candidate.count, candidate.members).isomorphic[1:-1]
    return len(kinds) > 1 and len(set(kinds)) == 1


def other_even_candidates(problem: Problem, source: StageSource, candidate: Candidate) -> Iterator[Candidate]:
    """Even stages in other numbers, and then those of a candidate on the likeliest other logical mesh.

    Of a step whose stages are equal these are what the dynamic program chooses from.

    Args:
        problem: what is planned.
        source: cuts its step.
        candidate: even stages on equal submeshes.
    """
    for other in even_candidates(problem, source):
        if len(other.members) != len(candidate.members):
            yield replace(other, schedule=None)
    (first, size), shape = candidate.devices[0], candidate.meshes[0]
    meshes = by_likeness(problem.cluster.part(first, size))
    mesh = next((m for m in meshes if m.shape != shape), None)
    if mesh is not None:
        yield replace(candidate, meshes=(mesh.shape,) * len(candidate.members))


def even_candidates(problem: Problem, source: StageSource) -> Iterator[Candidate]:
    """Even stages on equal submeshes: as many as there are nodes first.

    Each number is in the microbatches that a relaxation expects to be the fastest, then in many, which hold least.

    Args:
        problem: what is planned.
        source: cuts its step.
    """
    schedule, cluster = schedule_of(problem), problem.cluster
    counts = [s for s in stage_counts(problem, schedule) if cluster.num_devices % s == 0]
    counts.sort(key=lambda s: (abs(math.log2(s / cluster.num_nodes)), -s))
    for stages in counts:
        size = cluster.num_devices // stages
        node = math.gcd(size, cluster.groups[0].devices_per_node)
        many = problem.job.num_microbatches or _microbatches(problem, stages, size // node)
        shape = (size,) if size == node else (size // node, node)
        for count in dict.fromkeys((problem.subproblem.first_count or many, many)):
            candidate = _even_candidate(problem, source, stages, count, shape)
            if candidate is not None:
                yield candidate


def _even_candidate(
    problem: Problem, source: StageSource, stages: int, count: int, shape: tuple[int, ...]
) -> Candidate | None:
    """Even stages on equal submeshes of a shape in so many microbatches; None where there are none."""
    try:
        microbatching = source.microbatches(count)
        layers = layers_of(problem, source, count, stages, stages)
        here = schedule_for(problem, microbatching)
        table = table_for(here, stages, microbatching)
    except (MicrobatchError, ScheduleError):
        return None
    if len(layers.members) < stages or not has_stage_a_worker(table):
        return None
    size = math.prod(shape)
    placements = tuple((s * size, size) for s in range(stages))
    members = even_stages(layers, stages)
    return Candidate(count, members, placements, math.inf, layers.recomputed, (shape,) * stages, here)


def _microbatches(problem: Problem, stages: int, replicas: int) -> int:
    """As many microbatches as may be ranked, each of an example or more for every node of a stage.

    At least as many as stages: tokens are split as well.
    """
    size = batch_size(problem.graph) or 1
    each = min(problem.policy.enumeration.most_microbatches_per_stage * stages, size // replicas)
    return most_microbatches(problem, max(each, stages))
