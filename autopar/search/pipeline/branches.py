"""The search of branches side by side: which are in a stage of their own, on what devices, in how many microbatches.

Branches are found in the forward pass (`autopar.ir.independent`) by the seconds that each operator takes one device at
its best. Groups of them are stages of their own, each on a part of the devices; what several need is a stage before
them, what joins them a stage after them, both on the devices of one of the groups. All groupings and submeshes are
enumerated, and those of the least estimates are planned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from autopar.cost import LeastWork, operator_bytes, send_line, total_flops
from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.ir import Graph, Operator
from autopar.ir.independent import IndependentBranches, grouped, independent_branches
from autopar.ir.primitives import is_fusible
from autopar.microbatch import Microbatching, analyze, even_counts
from autopar.plan import Plan
from autopar.schedule.branches import Branches
from autopar.search.clock import Clock, units_of
from autopar.search.outcome import Bounded
from autopar.search.pipeline.candidates import Candidate, CuttableStep, submeshes_of_all, trains
from autopar.search.pipeline.partition import placed
from autopar.search.pipeline.search_space import microbatchings
from autopar.search.pipeline.trials import PipelineSearch, PipelineTrial, fastest_of, nothing_planned, seconds_of
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.search.trials import Trials
from autopar.stages import Layers, assign, cluster
from autopar.stages.layers import forward_operators

#: What closes ways of placing branches that are not planned.
_SHARED_WITHOUT_LOSS = "branches that their devices share without a loss, with what they send, an estimate"

#: Ways to give devices to groups: by group (first device, number of devices).
_Places = Sequence[tuple[tuple[int, int], ...]]


def branches_of(problem: Problem, microbatching: Microbatching) -> IndependentBranches | None:
    """The independent branches of the forward pass; None where there are none that are much of its work."""
    operators = forward_operators(problem.graph, microbatching)
    seconds = [_seconds(problem, op) for op in operators]
    return independent_branches(operators, seconds, problem.policy.effort.least_part)


def has_branches(problem: Problem) -> bool:
    """Whether a step has branches that may run side by side."""
    try:
        return branches_of(problem, analyze(problem.graph, 1)) is not None
    except MicrobatchError:
        return False


def _seconds(problem: Problem, op: Operator) -> float:
    """The least seconds of an operator on one device; of those that fuse into others the FLOPs alone."""
    types = problem.graph.operand_types(op)
    dtypes = tuple(sorted({v.type.dtype for v in op.results} | {t.dtype for t in types}))
    moved = 0.0 if is_fusible(op) or op.regions else operator_bytes(op, types)
    work = LeastWork(total_flops(problem.graph, op), moved, dtypes, starts=False)
    return problem.cost_model.least_s(work, 1)


@dataclass(frozen=True)
class _BranchStages:
    """Groups of branches as stages.

    Args:
        members: by stage the ids of its operators: what several groups need, if anything, groups, what joins them.
        groups: numbers of the stages that are groups.
        forward_s: by stage the seconds of its operators on one device.
        backward_s: those of its backward pass.
        sent: by stage, and stage that reads what it makes, the bytes there.
    """

    members: tuple[tuple[str, ...], ...]
    groups: range
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sent: Mapping[tuple[int, int], float]


def side_by_side(problem: Problem, source: StageSource) -> Iterator[list[Candidate]]:
    """Candidates with branches side by side, by number of microbatches, those of the least estimates first.

    Args:
        problem: what is planned.
        source: cuts its step.

    Raises:
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    asked, policy = problem.job.num_microbatches, problem.policy.branches
    places_of: dict[int, _Places] = {}
    between_s, seconds = _between(problem), {op.id: _seconds(problem, op) for op in problem.graph.operators}
    for microbatching in microbatchings(problem, source, [asked] if asked is not None else even_counts(problem.graph)):
        branches, count = branches_of(problem, microbatching), microbatching.count
        if branches is None:
            continue
        cuts = (
            placement
            for cut in _cuts(problem, microbatching, branches, seconds)
            for placement in _placed(cut, _places(problem, len(cut.groups), places_of), between_s, count)
        )
        least = heapq.nsmallest(policy.most_candidates, cuts, key=lambda placement: placement.estimate_s)
        layers = cluster(problem.graph, microbatching, problem.policy.enumeration.most_layers).recomputed
        yield [_candidate(problem, placement, count, layers) for placement in least]


def _cuts(
    problem: Problem, microbatching: Microbatching, branches: IndependentBranches, seconds: Mapping[str, float]
) -> Iterator[_BranchStages]:
    """All ways to put branches into two groups or more, of as many as there are devices at most.

    Args:
        problem: what is planned.
        microbatching: its microbatches.
        branches: of its forward pass.
        seconds: by operator those that it takes one device.
    """
    most, asked = problem.policy.branches.most_branches, problem.job.num_stages
    operators = forward_operators(problem.graph, microbatching)
    backward_s = _backward_seconds(problem.graph, microbatching, operators, branches, seconds)
    count = len(branches.branches)
    together = [[n] for n in range(min(count, most))]
    together[-1] += range(len(together), count)
    for partition in _partitions(range(len(together))):
        groups = [[n for k in some for n in together[k]] for some in partition]
        if not 2 <= len(groups) <= problem.cluster.num_devices:
            continue
        trunk, stages, merge = grouped(operators, branches, groups)
        members = (*((trunk,) if trunk else ()), *stages, *((merge,) if merge else ()))
        if asked is None or len(members) == asked:
            first = int(bool(trunk))
            own_s, back_s = (tuple(sum(of[id] for id in ids) for ids in members) for of in (seconds, backward_s))
            sent = _sent(problem.graph, members)
            yield _BranchStages(members, range(first, first + len(stages)), own_s, back_s, sent)


def _backward_seconds(
    graph: Graph,
    microbatching: Microbatching,
    operators: Sequence[Operator],
    branches: IndependentBranches,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Seconds of the backward pass by operator of the forward pass: their shares of those of their branch.

    Args:
        graph: the step.
        microbatching: its microbatches.
        operators: of its forward pass.
        branches: of them.
        seconds: by operator those that it takes one device.
    """
    trunk, parts, merge = grouped(operators, branches, [[n] for n in range(len(branches.branches))])
    members = [ids for ids in (trunk, *parts, merge) if ids]
    before = range(int(bool(trunk)))
    after = [[] if s in before else list(before) for s in range(len(members))]
    if merge:
        after[-1] = list(range(len(members) - 1))
    layers = Layers(tuple(members), (0.0,) * len(members), (0,) * (len(members) - 1))
    map = assign(graph, microbatching, layers, range(1, len(members) + 1), after=after)
    backward_s = [0.0] * len(members)
    for id in map.backward:
        for stage in map.body[id]:
            backward_s[stage] += seconds[id]
    shares = [back_s / (sum(seconds[id] for id in ids) or 1.0) for back_s, ids in zip(backward_s, members, strict=True)]
    return {id: share * seconds[id] for share, ids in zip(shares, members, strict=True) for id in ids}


def _sent(graph: Graph, members: Sequence[Sequence[str]]) -> Mapping[tuple[int, int], float]:
    """Bytes that stages read of what earlier ones make, by maker and reader.

    Args:
        graph: the step.
        members: by stage the ids of its operators.
    """
    values = {
        v.name: (s, v.type.nbytes) for s, ids in enumerate(members) for id in ids for v in graph.by_id[id].results
    }
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for reader, ids in enumerate(members):
        for name in {n for id in ids for n in graph.by_id[id].reads if n in values}:
            maker, nbytes = values[name]
            if maker != reader:
                sent[maker, reader] += float(nbytes)
    return sent


#: Seconds of so many bytes from the devices of one worker to those of another: (first device, number of devices).
_Between: TypeAlias = Callable[[float, tuple[int, int], tuple[int, int]], float]


def _between(problem: Problem) -> _Between:
    """Seconds of a send, the same for places that are looked at again."""
    cluster = problem.cluster

    @cache
    def rate(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        source, target = (range(first, first + size) for first, size in (one, other))
        return send_line(cluster, source, target)

    def seconds(nbytes: float, one: tuple[int, int], other: tuple[int, int]) -> float:
        begins_s, each_s = rate(one, other)
        return begins_s + nbytes * each_s if nbytes and one != other else 0.0

    return seconds


def _partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into groups, in a fixed order."""
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for n in range(len(rest)):
            yield [*rest[:n], [items[0], *rest[n]], *rest[n + 1 :]]


def _places(problem: Problem, groups: int, known: dict[int, _Places]) -> _Places:
    """Ways to give all devices to so many groups; ``known`` has them by number of groups."""
    if groups not in known:
        known[groups] = [placed(problem.cluster, kinds) for kinds in submeshes_of_all(problem, groups)]
    return known[groups]


@dataclass(frozen=True)
class _Placement:
    """A cut on devices.

    Args:
        estimate_s: T.
        cut: the stages.
        places: by worker its devices.
        workers: by stage its worker.
    """

    estimate_s: float
    cut: _BranchStages
    places: tuple[tuple[int, int], ...]
    workers: tuple[int, ...]


def _placed(cut: _BranchStages, places_of_groups: _Places, between_s: _Between, count: int) -> Iterator[_Placement]:
    """A cut on all submeshes; what is before and after the groups on the devices of each of them.

    Args:
        cut: the stages.
        places_of_groups: ways to give devices to groups.
        between_s: prices sends.
        count: m.
    """
    first, groups = cut.groups.start, len(cut.groups)
    others = [s for s in range(len(cut.members)) if s not in cut.groups]
    for places in places_of_groups:
        for joining in itertools.product(range(groups), repeat=len(others)):
            worker_of = {**{s: s - first for s in cut.groups}, **dict(zip(others, joining, strict=True))}
            workers = tuple(worker_of[s] for s in range(len(cut.members)))
            forward_s, backward_s = (
                [seconds / places[w][1] for seconds, w in zip(of, workers, strict=True)]
                for of in (cut.forward_s, cut.backward_s)
            )
            sends_s = {
                (s, t): between_s(nbytes, places[workers[s]], places[workers[t]]) for (s, t), nbytes in cut.sent.items()
            }
            least_s = _least_s(forward_s, backward_s, workers, sends_s, count)
            yield _Placement(least_s, cut, places, workers)


def _least_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    workers: Sequence[int],
    sends_s: Mapping[tuple[int, int], float],
    count: int,
) -> float:
    """Seconds that m microbatches take at least on workers that share the work of their stages without a loss.

    A microbatch takes the longest path through its stages and sends. A worker that is busy for B seconds waits for the
    first of its forward passes, and others work on after the last of its backward passes. Before its first backward
    pass it has nothing but F seconds of forward passes to do, while a microbatch goes to the last stage and comes back:

        B + max(head / m, (head + forward + after) / m - F) + tail / m

    with the least head and tail of its stages, and the least sum of the three.

    Args:
        forward_s: by stage the seconds of the forward pass.
        backward_s: by stage those of the backward pass; all zero where there is none.
        workers: by stage its worker.
        sends_s: by maker and reader the seconds there; gradients take the same way back.
        count: m.
    """
    stages, back = range(len(workers)), float(any(backward_s))
    head_s, tail_s, after_s = ([0.0] * len(workers) for _ in range(3))
    for s, t in sorted(sends_s):
        head_s[t] = max(head_s[t], head_s[s] + forward_s[s] + sends_s[s, t])
        tail_s[t] = max(tail_s[t], tail_s[s] + backward_s[s] + back * sends_s[s, t])
    for s, t in sorted(sends_s, reverse=True):
        after_s[s] = max(after_s[s], (1 + back) * sends_s[s, t] + forward_s[t] + backward_s[t] + after_s[t])
    path_s = max(head_s[s] + forward_s[s] + after_s[s] + backward_s[s] + tail_s[s] for s in stages)
    least_s = [path_s / count, (1 + back) * max(sends_s.values(), default=0.0)]
    for worker in set(workers):
        some = [s for s in stages if workers[s] == worker]
        ahead_s = sum(forward_s[s] for s in some)
        busy_s = ahead_s + sum(backward_s[s] for s in some)
        comes_back_s = min(head_s[s] + forward_s[s] + after_s[s] for s in some)
        idle_s = max(min(head_s[s] for s in some) / count, comes_back_s / count - ahead_s)
        least_s.append(busy_s + idle_s + min(tail_s[s] for s in some) / count)
    return max(least_s)


def _candidate(problem: Problem, placement: _Placement, count: int, layers: tuple[tuple[str, ...], ...]) -> Candidate:
    """A placement in so many microbatches."""
    cut, workers = placement.cut, placement.workers
    after = tuple(tuple(sorted(r for r, t in cut.sent if t == s)) for s in range(len(cut.members)))
    schedule = Branches(after, workers, trains(problem))
    devices = tuple(placement.places[w] for w in workers)
    return Candidate(count, cut.members, devices, placement.estimate_s, layers, schedule=schedule)


def branches(problem: Problem, intra: Callable[[Problem], Plan | Bounded]) -> Plan | Bounded:
    """The best plan with independent branches side by side on parts of the devices.

    Args:
        problem: what is planned; it has a source.
        intra: plans one stage on its submesh.

    Raises:
        InfeasiblePlanError: the step has no such branches, or no way of placing them fits.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    source, clock = problem.source, Clock()
    if source is None:
        raise _no_branches(problem)
    search = PipelineSearch(CuttableStep(problem, source, intra), clock, form="branches")
    trials: Trials[PipelineTrial, Plan] = Trials(search.attempt)
    plans: list[Plan] = []
    least_s = math.inf
    of_counts = side_by_side(problem, source)
    for every in of_counts:
        least_s = min([least_s, *(c.estimate_s for c in every)])
        some = _may_win(problem, every)
        plans = trials.run([PipelineTrial(c, is_optional=True) for c in some])
        if plans:
            break
    if plans:
        plans += _in_more_microbatches(search, trials, of_counts)
    if not plans:
        if trials.failures or trials.impossible or trials.bounded is not None:
            return nothing_planned(problem, trials)
        if math.isfinite(least_s):
            return Bounded(_SHARED_WITHOUT_LOSS, least_s)
        raise _no_branches(problem)
    return fastest_of(plans, clock)


def _may_win(problem: Problem, some: Sequence[Candidate]) -> list[Candidate]:
    """Candidates whose estimates are below the plan at hand by more than the gap of the search."""
    most_s = (1 - problem.policy.effort.gap_after(units_of(problem.meter))) * problem.subproblem.cutoff_s
    return [c for c in some if c.estimate_s < most_s]


def _in_more_microbatches(
    search: PipelineSearch, trials: Trials[PipelineTrial, Plan], of_counts: Iterator[list[Candidate]]
) -> list[Plan]:
    """Plans of the placements that gain most from more microbatches, up to the number that gains nothing.

    A placement is estimated to take as much longer than its bound as the planned one that comes closest to its own. Of
    each number the placement of the least bound is planned, with those whose stages have as many devices, which share
    its plans of stages: as long as it may be faster than all that is planned, and than the plan at hand.

    Args:
        search: has the plans in the fewest microbatches.
        trials: plans a candidate.
        of_counts: candidates in more microbatches, by rising number.
    """
    plans, least_gain = list[Plan](), search.problem.policy.effort.least_gain
    for some in of_counts:
        fastest_s = min([search.problem.subproblem.cutoff_s, *(plan.step_time for plan, _ in search.planned)])
        least_ratio = min((plan.step_time / candidate.estimate_s for plan, candidate in search.planned), default=1.0)
        least = min(some, key=lambda c: c.estimate_s, default=None)
        if least is None or least_ratio * least.estimate_s > (1 - least_gain) * fastest_s:
            break
        equal = [c for c in some if _sizes(c) == _sizes(least)]
        planned = trials.run([PipelineTrial(c, is_optional=True) for c in equal], cutoff_s=fastest_s)
        plans += planned
        if min(map(seconds_of, planned), default=math.inf) >= fastest_s:
            break
    return plans


def _sizes(candidate: Candidate) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Stages of a candidate and their numbers of devices."""
    return candidate.members, tuple(size for _, size in candidate.devices)


def _no_branches(problem: Problem) -> InfeasiblePlanError:
    stages = problem.job.num_stages
    return InfeasiblePlanError(
        f"{problem.graph.name} has no independent branches that may run side by side"
        + ("" if stages is None else f" in {stages} stages"),
        cause="every expensive operator waits for the others, or there is one device",
        remedy='schedule="auto", and num_stages="auto" where branches are asked for',
    )
