"""Which numbers of stages may beat a plan that is at hand: the whole step is sharded on the devices of one equal stage.

A pipeline of S equal stages runs each operator on D / S devices, and each device a share 1 / S of the operators. So a
step that takes t of computing and sending where D / S devices run all of it takes, in as many microbatches,

    T = h t / S (m + b (S - 1)) / m

without what stages send each other and waiting, where h is the part of the plan of one stage that is not hidden behind
computing, and b what weight gradients leave of the bubble. Of t two numbers of microbatches say what it is in others:
t(m) = u + v m. That is an estimate, for stages may be unequal, each has a mesh of its own, and as much need not be
hidden; no bound is made of it.

On a cluster where stages are whole nodes pairs of S and m are ranked by u t / S with the bubble of 1F1B,
(m + S - 1) / m, where t is a step with what hides behind computing, and u what the heaviest stage has more than its
share. Schedules with less of the bubble hold more activations: LLaMA 405B was planned a fifth slower by a third of it.
So interleaved stages, v on each worker, whose bubble is (m + (S - 1) / v) / m (Narayanan et al., 2021, section 2.2),
are ranked for themselves.
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
from autopar.plan import StepForm
from autopar.search.enumeration.reach import EQUAL_STAGES, least_by_stages
from autopar.search.enumeration.search_space import may_have_stages, stages_of_whole_nodes, unevenness
from autopar.search.intra import ShardingProblem, build, extract
from autopar.search.intra.slack import step_s
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.search.source import StepSource
from autopar.search.trail import Region
from autopar.solver import Solution, first_look, solve
from autopar.solver.goal import Goal
from autopar.solver.memory import memory_floor

#: What closes a number of stages, in words.
_WHOLE_STEP = "the whole step on the devices of one stage with the bubble, an estimate"


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
        least_s = self.pairs[0][0] if self.pairs else math.inf
        if not self.interleaved or self.interleaved[0][0] >= share * least_s:
            return None
        _, workers, count, chunks = self.interleaved[0]
        return workers, count, chunks


def stages_that_may_be_faster(
    problem: Problem, step: StepSource, counts: Sequence[int] | None, cutoff_s: float, exposed: float
) -> tuple[int, ...] | Bounded:
    """Numbers of stages with which a pipeline may take less than ``cutoff_s``; `Bounded` where there are none.

    Of numbers that do not divide the devices no equal stage is looked at: they are tried where one that does may be
    faster.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        counts: numbers of microbatches that may be taken; None for all.
        cutoff_s: seconds of a plan that is at hand.
        exposed: part of the seconds of computing and sending that a plan of one stage does not hide.
    """
    devices, policy = problem.cluster.num_devices, problem.policy.enumeration
    size = batch_size(problem.graph) or 1
    possible = list(counts or [2**k for k in range(size.bit_length()) if size % 2**k == 0])
    faster, divides, uneven = list[int](), False, list[int]()
    for stages, least_s in sorted(least_by_stages(problem, counts).items()):
        region = Region.of_stages("pipeline", [stages])
        if least_s >= cutoff_s:
            problem.trail.close(region, Bounded(EQUAL_STAGES, least_s))
            continue
        if devices % stages:
            uneven.append(stages)
            continue
        divides = True
        if len(problem.cluster.groups) == 1:
            count = max((n for n in possible if n <= policy.whole_step_microbatches * stages), default=min(possible))
            try:
                if _takes_as_long(problem, step, stages, count, possible, cutoff_s / exposed):
                    problem.trail.close(region, Bounded(_WHOLE_STEP, cutoff_s))
                    continue
            except MicrobatchError:
                pass
        faster.append(stages)
    if faster or not divides:
        faster = sorted([*faster, *uneven])
    if not faster:
        return Bounded(_WHOLE_STEP, cutoff_s)
    return tuple(faster)


def ranked_on_whole_nodes(
    problem: Problem, step: StepSource, counts: Sequence[int] | None, exposed: float = 1.0
) -> RankedPairs | Bounded:
    """Pairs (stages, microbatches) by rising estimate, on a cluster where stages are whole nodes.

    `Bounded` where none may take less than the plan at hand.

    Estimates are as above. Numbers of stages are compared in a middle number of microbatches, and in the first of the
    others where they take as long as the plan at hand there; then the best of them in others. Pairs that would take as
    long as that plan with what of the bubble weight gradients cannot fill are left out.

    Args:
        problem: the step in one microbatch; its number of stages is free, and its ``cutoff_s`` that of a plan at hand.
        step: in other forms.
        counts: numbers of microbatches that may be taken; None for all.
        exposed: part of the seconds of computing and sending that a plan of one stage does not hide.
    """
    policy, left = problem.policy.enumeration, problem.policy.schedules.bubble_left
    cutoff_s, size = problem.subproblem.cutoff_s, batch_size(problem.graph) or 1
    hidden = min(exposed, 1 / problem.policy.partition.near_best)
    possible = list(counts or [2**k for k in range(size.bit_length()) if size % 2**k == 0])
    estimates: dict[tuple[int, int], float] = {}
    interleaved: dict[tuple[int, int, int], float] = {}
    looked: set[tuple[int, int]] = set()
    fastest_mesh: dict[int, LogicalMesh] = {}  # in one number of microbatches, which is taken for the others

    def estimate(stages: int, per_stage: int) -> None:
        count = max((n for n in possible if n <= per_stage * stages), default=min(possible))
        if (stages, count) in looked:
            return
        looked.add((stages, count))
        try:
            graph, uneven = step.in_form(StepForm(count)).graph, unevenness(problem, stages)
        except MicrobatchError:
            return
        least_s = cutoff_s / (1 + left * (stages - 1) / count) / uneven
        some = _steps_by_mesh_s(problem, graph, count, stages, least_s, hidden, fastest_mesh.get(stages))
        seconds, mesh = min(some, key=lambda timed: timed[0])
        if seconds < least_s:
            fastest_mesh.setdefault(stages, mesh)
            estimates[stages, count] = uneven * seconds * (count + stages - 1) / count
        for chunks in problem.policy.schedules.ranked_chunks:
            seconds_s = seconds * unevenness(problem, stages * chunks) * (count + (stages - 1) / chunks) / count
            if count % stages == 0 and may_have_stages(problem, stages * chunks) and seconds_s < cutoff_s:
                interleaved[stages, count, chunks] = seconds_s

    for stages in _on_few_devices(problem, stages_of_whole_nodes(problem)):
        estimate(stages, policy.middle_microbatches_per_stage)
        if all(s != stages for s, _ in estimates):
            estimate(stages, policy.other_microbatches_per_stage[0])
    best = dict.fromkeys(stages for stages, _ in sorted(estimates, key=lambda pair: (estimates[pair], pair)))
    chunked_best = dict.fromkeys(key[0] for key in sorted(interleaved, key=lambda key: (interleaved[key], key)))
    for stages in dict.fromkeys(s for some in (best, chunked_best) for s in list(some)[: policy.most_ranked_stages]):
        for per_stage in policy.other_microbatches_per_stage:
            estimate(stages, per_stage)
    for stages, count in sorted(looked):
        region = Region.of_stages("pipeline", [stages], [count])
        problem.trail.close(region, Bounded(_WHOLE_STEP, estimates.get((stages, count), cutoff_s)))
    if not estimates and not interleaved and cutoff_s < math.inf:
        return Bounded(_WHOLE_STEP, cutoff_s)
    chunked = sorted((seconds, *key) for key, seconds in interleaved.items())
    return RankedPairs(tuple(sorted((seconds, *pair) for pair, seconds in estimates.items())), tuple(chunked))


def _on_few_devices(problem: Problem, every: Sequence[int]) -> Sequence[int]:
    """Numbers of stages with few devices each, where there are some: others have many meshes, each slow to plan."""
    most = problem.policy.enumeration.most_stage_devices
    return [stages for stages in every if problem.cluster.num_devices <= most * stages] or every


def counts_that_may_fit(problem: Problem, step: StepSource, counts: Sequence[int]) -> list[int]:
    """Numbers of microbatches, rising, from the first on in which one stage that recomputes nothing may fit.

    More microbatches hold less, so that the first is found by halving: by what all values hold at least on some mesh,
    that most like the machine first. Where none may fit all are given.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        counts: numbers of microbatches that may be taken, rising.
    """

    def fits(count: int) -> bool:
        try:
            graph = step.in_form(StepForm(count)).graph
        except MicrobatchError:
            return False
        problem.checkpoint()
        options = replace(problem.options, num_microbatches=count, num_stages=1, remat="auto", schedule="auto")
        stage = replace(problem, graph=graph, options=options)
        some = (build(stage, mesh) for mesh in by_likeness(problem.cluster)[: problem.policy.enumeration.ranked_meshes])
        return any(not s.broken and memory_floor(s.problem) <= problem.memory_limit_bytes for s in some)

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
    whole = step.in_form(StepForm(count)).graph
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
    seconds[other] = _equal_stages_s(problem, step.in_form(StepForm(other)).graph, other, stages)
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
    for seconds in islice(meshes, problem.policy.enumeration.whole_step_meshes):
        fastest_s = min(fastest_s, seconds)
        if fastest_s < sufficient_s:
            break
    return fastest_s


def _by_mesh_s(problem: Problem, graph: Graph, count: int, stages: int, cutoff_s: float) -> Iterator[float]:
    """t / S as above by mesh, those most like the machine first; infinity above ``cutoff_s`` and the fastest so far."""
    fastest_s = cutoff_s
    whole = _on_one_stage(problem, graph, count, stages)
    for mesh in by_likeness(whole.cluster):
        _, look = _look(whole, mesh, stages * fastest_s)
        seconds = look.objective / stages if look.found else math.inf
        fastest_s = min(fastest_s, seconds)
        yield seconds


def _steps_by_mesh_s(
    problem: Problem,
    graph: Graph,
    count: int,
    stages: int,
    cutoff_s: float,
    hidden: float,
    known: LogicalMesh | None,
) -> Iterator[tuple[float, LogicalMesh]]:
    """Seconds of a step over S by ranked mesh, with what computation hides; infinity from ``cutoff_s`` on.

    Args:
        problem: the step in one microbatch.
        graph: the step in ``count`` of them.
        count: number of microbatches.
        stages: S.
        cutoff_s: seconds from which they are of no use.
        hidden: share of computing and sending below which a step is taken never to be.
        known: the mesh that is looked at; None for the likeliest ones.
    """
    whole = _on_one_stage(problem, graph, count, stages)
    likeliest = by_likeness(whole.cluster)[: problem.policy.enumeration.ranked_meshes]
    for mesh in likeliest if known is None else [known]:
        sharding_problem, look = _look(whole, mesh, stages * cutoff_s / hidden)
        if not look.found or look.objective >= stages * cutoff_s / hidden:
            yield math.inf, mesh
            continue
        seconds = step_s(extract(whole, sharding_problem, look.choice)) / stages
        cutoff_s = min(cutoff_s, seconds)
        yield seconds, mesh


def _on_one_stage(problem: Problem, graph: Graph, count: int, stages: int) -> Problem:
    """The whole step in ``count`` microbatches on the devices of one of so many equal stages."""
    problem.checkpoint()
    part = problem.cluster.part(0, problem.cluster.num_devices // stages)
    options = replace(problem.options, num_microbatches=count, num_stages=1, offload="none", constraints=())
    return replace(problem, graph=graph, cluster=part, cost_model=problem.cost_model.on(part), options=options)


def _look(whole: Problem, mesh: LogicalMesh, cutoff_s: float) -> tuple[ShardingProblem, Solution]:
    """The problem of a mesh, and a look at it without a memory limit, or its answer where it is too small for one."""
    sharding_problem = build(whole, mesh)
    free = replace(sharding_problem.problem, limit_bytes=None)
    goal = Goal(whole.policy.enumeration.whole_step_gap, cutoff_s)
    return sharding_problem, first_look(free, goal) or solve(free, goal=goal)
