"""All slicings of a tiny step into stages on submeshes, for which no estimate is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.errors import MicrobatchError, ScheduleError
from autopar.search.enumeration.candidates import (
    Candidate,
    has_stage_a_worker,
    schedule_for,
    schedule_of,
    table_for,
)
from autopar.search.enumeration.search_space import microbatch_counts
from autopar.search.partition.submesh import Submesh, of_equal_nodes, placed, submeshes
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.stages import cluster


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
    for count in [job.num_microbatches] if job.num_microbatches is not None else microbatch_counts(problem):
        try:
            microbatching = source.microbatches(count)
            layers = cluster(problem.graph, microbatching, policy.most_layers, fewest=None).members
        except MicrobatchError:
            if job.num_microbatches is not None:
                raise
            continue
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
                    yield Candidate(count, members, placement, 0.0, layers)


def submeshes_of_all(problem: Problem, stages: int) -> Iterator[tuple[Submesh, ...]]:
    """Submeshes of so many stages that together are all devices."""
    kinds = submeshes(problem.cluster)
    if problem.subproblem.uniform_stages:
        kinds = of_equal_nodes(problem.cluster, kinds, stages)
    yield from _filling([group.size for group in problem.cluster.groups], kinds, stages)


def _filling(left: Sequence[int], kinds: Sequence[Submesh], stages: int) -> Iterator[tuple[Submesh, ...]]:
    """Sequences of ``stages`` submeshes that take all devices that are ``left`` of each group."""
    if not stages:
        if not any(left):
            yield ()
        return
    for kind in kinds:
        rest = [n - kind.size * (g == kind.group) for g, n in enumerate(left)]
        largest = max(k.size for k in kinds)
        if min(rest) >= 0 and stages - 1 <= sum(rest) <= largest * (stages - 1):
            for others in _filling(rest, kinds, stages - 1):
                yield kind, *others
