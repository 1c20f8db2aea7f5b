"""Which numbers of stages may beat a plan that is at hand: the whole step is sharded on the devices of one equal stage.

A pipeline of S equal stages runs each operator on D / S devices, and each device a share 1 / S of the operators. So a
step that takes t of computing and sending where D / S devices run all of it takes, in as many microbatches,

    T = h t / S (m + b (S - 1)) / m

without what stages send each other and waiting, where h is the part of the plan of one stage that is not hidden behind
computing, and b what weight gradients leave of the bubble. Of t two numbers of microbatches say what it is in others:
t(m) = u + v m. That is an estimate, for stages may be unequal, each has a mesh of its own, and as much need not be
hidden; no bound is made of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autopar.cluster import Cluster, LogicalMesh
from autopar.errors import MicrobatchError
from autopar.ir import Graph
from autopar.microbatch import batch_size
from autopar.search.enumeration.reach import least_by_stages
from autopar.search.enumeration.search_space import stages_of_whole_nodes
from autopar.search.intra import build
from autopar.search.problem import Problem, not_faster
from autopar.search.source import StepSource
from autopar.solver import first_look, solve
from autopar.solver.goal import Goal
from autopar.solver.memory import memory_floor


@dataclass(frozen=True)
class RankedPairs:
    """Pairs that are worth planning.

    Args:
        pairs: (seconds, stages, microbatches), one stage on each worker, by rising estimate.
        interleaved: (seconds, workers, microbatches, stages on each worker), by rising estimate.
    """

    pairs: tuple[tuple[float, int, int], ...]
    interleaved: tuple[tuple[float, int, int, int], ...] = ()

    def chunked(self, share: float) -> tuple[int, int, int] | None:
        """(workers, microbatches, stages on each worker) of the least estimate.

        Args:
            share: of the least estimate of ``pairs`` that it must be below; else, or where there is none, None.
        """
        if not self.interleaved or self.interleaved[0][0] >= share * self.pairs[0][0]:
            return None
        _, workers, count, chunks = self.interleaved[0]
        return workers, count, chunks


def stages_that_may_be_faster(
    problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float, exposed: float
) -> tuple[int, ...]:
    """Numbers of stages with which a pipeline may take less than ``cutoff_s``.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        counts: numbers of microbatches that may be taken; None for all.
        cutoff_s: seconds of a plan that is at hand.
        exposed: part of the seconds of computing and sending that a plan of one stage does not hide.

    Raises:
        NotFasterError: there are none.
    """
    devices, policy = problem.cluster.num_devices, problem.policy.enumeration
    size = batch_size(problem.graph) or 1
    possible = list(counts or [2**k for k in range(size.bit_length()) if size % 2**k == 0])
    faster = []
    for stages, least_s in sorted(least_by_stages(problem, counts).items()):
        if least_s >= cutoff_s:
            continue
        if devices % stages == 0 and len(problem.cluster.groups) == 1:
            count = max((n for n in possible if n <= policy.whole_step_microbatches * stages), default=min(possible))
            try:
                if _takes_as_long(problem, step, stages, count, possible, cutoff_s / exposed):
                    continue
            except MicrobatchError:
                pass
        faster.append(stages)
    if not faster:
        raise not_faster(problem, cutoff_s, "equal stages without a bubble take as long")
    return tuple(faster)


def ranked_on_whole_nodes(
    problem: Problem, step: StepSource, counts: Sequence[int] | None, exposed: float = 1.0
) -> RankedPairs:
    """Pairs (stages, microbatches) by rising estimate, on a cluster where stages are whole nodes.

    The estimate of S stages in m microbatches is t / S as above with the bubble of 1F1B, (m + S - 1) / m. Schedules
    with less of it hold more activations: with a third of it LLaMA 405B was planned a fifth slower. So interleaved
    stages, v on each worker, whose bubble is (m + (S - 1) / v) / m (Narayanan et al., 2021, section 2.2), are ranked
    for themselves. Numbers of stages are compared in a middle number of microbatches, then the best of them in others.
    Pairs that would take as long as the plan at hand with what of the bubble weight gradients cannot fill are left out.

    Args:
        problem: the step in one microbatch; its number of stages is free, and its ``cutoff_s`` that of a plan at hand.
        step: in other forms.
        counts: numbers of microbatches that may be taken; None for all.
        exposed: part of the seconds of computing and sending that a plan of one stage does not hide.

    Raises:
        NotFasterError: none may take less than ``cutoff_s``.
    """
    policy, size = problem.policy.enumeration, batch_size(problem.graph) or 1
    cutoff_s, left = problem.subproblem.cutoff_s, problem.policy.schedules.bubble_left
    possible = list(counts or [2**k for k in range(size.bit_length()) if size % 2**k == 0])
    estimates: dict[tuple[int, int], float] = {}
    interleaved: dict[tuple[int, int, int], float] = {}
    fastest_mesh: dict[int, LogicalMesh] = {}

    def estimate(stages: int, per_stage: int) -> None:
        count = max((n for n in possible if n <= per_stage * stages), default=min(possible))
        if (stages, count) in estimates:
            return
        try:
            graph = step.single_stage(count, "none").graph
        except MicrobatchError:
            return
        least_s = cutoff_s / (1 + left * (stages - 1) / count) / exposed
        # The mesh that is the fastest in one number of microbatches is taken for the others.
        known = [fastest_mesh[stages]] if stages in fastest_mesh else None
        by_mesh = islice(_by_mesh_s(problem, graph, count, stages, least_s, known), policy.ranked_meshes)
        seconds, mesh = min(by_mesh, key=lambda timed: timed[0])
        if seconds < least_s:
            fastest_mesh.setdefault(stages, mesh)
            estimates[stages, count] = seconds * (count + stages - 1) / count
            for chunks in problem.policy.schedules.ranked_chunks:
                if count % stages == 0 and stages * chunks <= policy.most_stages:
                    interleaved[stages, count, chunks] = seconds * (count + (stages - 1) / chunks) / count

    for stages in stages_of_whole_nodes(problem):
        estimate(stages, policy.middle_microbatches_per_stage)
    best = dict.fromkeys(stages for stages, _ in sorted(estimates, key=lambda pair: (estimates[pair], pair)))
    least = min(interleaved, key=lambda key: (interleaved[key], key), default=())
    for stages in dict.fromkeys((*list(best)[: policy.most_ranked_stages], *least[:1])):
        for per_stage in policy.other_microbatches_per_stage:
            estimate(stages, per_stage)
    if not estimates and cutoff_s < math.inf:
        raise not_faster(problem, cutoff_s, "stages of whole nodes take as long")
    pairs = sorted((seconds, *pair) for pair, seconds in estimates.items())
    return RankedPairs(tuple(pairs), tuple(sorted((seconds, *key) for key, seconds in interleaved.items())))


def counts_that_may_fit(problem: Problem, step: StepSource, counts: Sequence[int]) -> list[int]:
    """Numbers of microbatches, rising, from the first on in which one stage that recomputes nothing may fit.

    More microbatches hold less, so that the first is found by halving: by what all values hold at least on the mesh
    that is most like the machine, which is about the least of every mesh. Where none may fit all are given.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        counts: numbers of microbatches that may be taken, rising.
    """

    def fits(count: int) -> bool:
        try:
            graph = step.single_stage(count, "none").graph
        except MicrobatchError:
            return False
        problem.checkpoint()
        options = replace(problem.options, num_microbatches=count, num_stages=1, remat="auto", schedule="auto")
        sharding_problem = build(replace(problem, graph=graph, options=options), by_likeness(problem.cluster)[0])
        return not sharding_problem.broken and memory_floor(sharding_problem.problem) <= problem.memory_limit_bytes

    first = 0 if fits(counts[0]) else bisect_left(counts, True, lo=1, key=fits)
    return list(counts[first:] or counts)


def by_likeness(part: Cluster) -> list[LogicalMesh]:
    """Logical meshes, those most like the machine first: nodes by devices of a node."""
    node = part.groups[0].devices_per_node
    return sorted(part.logical_meshes(None), key=lambda m: (abs(math.log2(m.shape[-1] / node)), m.shape))


def _takes_as_long(
    problem: Problem, step: StepSource, stages: int, count: int, possible: Sequence[int], cutoff_s: float
) -> bool:
    """Whether t / S as above, with what is left of the bubble, takes ``cutoff_s`` or more in all microbatches.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        stages: S.
        count: number of microbatches that is looked at first.
        possible: numbers of microbatches that may be taken.
        cutoff_s: seconds of a plan at hand, what it hides included.

    Raises:
        MicrobatchError: the step cannot be cut into numbers of microbatches that are looked at.
    """
    bubble = {n: 1 + problem.policy.schedules.bubble_left * (stages - 1) / n for n in possible}
    sufficient_s = cutoff_s / bubble[count]
    whole = step.single_stage(count, "none").graph
    seconds = {count: _equal_stages_s(problem, whole, count, stages, cutoff_s, sufficient_s)}
    if seconds[count] < sufficient_s:
        return False
    if seconds[count] >= cutoff_s:
        return True
    most = problem.policy.enumeration.most_ranked_per_stage * stages
    other = max((n for n in possible if n <= most), default=min(possible))
    other = min(possible) if other == count else other
    if other == count:
        return True
    seconds[other] = _equal_stages_s(problem, step.single_stage(other, "none").graph, other, stages)
    slope = (seconds[other] - seconds[count]) / (other - count)
    return all((seconds[count] + slope * (n - count)) * bubble[n] >= cutoff_s for n in possible if n <= most)


def _equal_stages_s(
    problem: Problem, graph: Graph, count: int, stages: int, cutoff_s: float = math.inf, sufficient_s: float = math.inf
) -> float:
    """t / S as above of the fastest of some meshes, or of the first below ``sufficient_s``.

    Any number above ``cutoff_s`` where it is more.
    """
    fastest_s = math.inf
    meshes = _by_mesh_s(problem, graph, count, stages, cutoff_s)
    for seconds, _ in islice(meshes, problem.policy.enumeration.whole_step_meshes):
        fastest_s = min(fastest_s, seconds)
        if fastest_s < sufficient_s:
            break
    return fastest_s


def _by_mesh_s(
    problem: Problem,
    graph: Graph,
    count: int,
    stages: int,
    cutoff_s: float,
    some: Sequence[LogicalMesh] | None = None,
) -> Iterator[tuple[float, LogicalMesh]]:
    """t / S as above by mesh, those most like the machine first; infinity above ``cutoff_s`` and the fastest so far.

    Args:
        problem: the step in one microbatch.
        graph: the step in ``count`` microbatches.
        count: their number.
        stages: S.
        cutoff_s: seconds that are of no use.
        some: meshes that are looked at; None for all.
    """
    problem.checkpoint()
    part = problem.cluster.part(0, problem.cluster.num_devices // stages)
    options = replace(problem.options, num_microbatches=count, num_stages=1, offload="none", constraints=())
    whole = replace(problem, graph=graph, cluster=part, cost_model=problem.cost_model.on(part), options=options)
    policy, fastest_s = problem.policy.enumeration, cutoff_s
    for mesh in some or by_likeness(part):
        sharding_problem = build(whole, mesh)
        free = replace(sharding_problem.problem, limit_bytes=None)
        goal = Goal(policy.whole_step_gap, stages * fastest_s)
        look = first_look(free, goal) or solve(free, goal=goal)
        seconds = look.objective / stages if look.found else math.inf
        fastest_s = min(fastest_s, seconds)
        yield seconds, mesh
