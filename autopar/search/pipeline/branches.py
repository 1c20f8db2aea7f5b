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
from autopar.ir.phases import phase_of
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
from autopar.stages import cluster
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
        weights: by stage the seconds of its operators, with those of its backward pass.
        sent: by stage, and stage that reads what it makes, the bytes, there and back.
    """

    members: tuple[tuple[str, ...], ...]
    groups: range
    weights: tuple[float, ...]
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
    between_s, times = _between(problem), _times_of_forward(problem)
    for microbatching in microbatchings(problem, source, [asked] if asked is not None else even_counts(problem.graph)):
        branches, count = branches_of(problem, microbatching), microbatching.count
        if branches is None:
            continue
        cuts = (
            placement
            for cut in _cuts(problem, microbatching, branches, times)
            for placement in _placed(cut, _places(problem, len(cut.groups), places_of), between_s, count)
        )
        least = heapq.nsmallest(policy.most_candidates, cuts, key=lambda placement: placement.estimate_s)
        layers = cluster(problem.graph, microbatching, problem.policy.enumeration.most_layers, fewest=None).members
        yield [_candidate(problem, placement, count, layers) for placement in least]


def _cuts(
    problem: Problem, microbatching: Microbatching, branches: IndependentBranches, times: float
) -> Iterator[_BranchStages]:
    """All ways to put branches into two groups or more, of as many as there are devices at most.

    Args:
        problem: what is planned.
        microbatching: its microbatches.
        branches: of its forward pass.
        times: see `_times_of_forward`.
    """
    most, asked = problem.policy.branches.most_branches, problem.job.num_stages
    operators = forward_operators(problem.graph, microbatching)
    seconds = {op.id: times * _seconds(problem, op) for op in operators}
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
            weights = tuple(sum(seconds[id] for id in ids) for ids in members)
            sent = _sent(problem.graph, members, 1 + trains(problem))
            yield _BranchStages(members, range(first, first + len(stages)), weights, sent)


def _sent(graph: Graph, members: Sequence[Sequence[str]], times: int) -> Mapping[tuple[int, int], float]:
    """Bytes that stages read of what earlier ones make, by maker and reader.

    Args:
        graph: the step.
        members: by stage the ids of its operators.
        times: 2 where gradients are sent back, else 1.
    """
    values = {
        v.name: (s, v.type.nbytes) for s, ids in enumerate(members) for id in ids for v in graph.by_id[id].results
    }
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for reader, ids in enumerate(members):
        for name in {n for id in ids for n in graph.by_id[id].reads if n in values}:
            maker, nbytes = values[name]
            if maker != reader:
                sent[maker, reader] += float(times * nbytes)
    return sent


def _times_of_forward(problem: Problem) -> float:
    """Seconds of the forward and the backward pass over those of the forward pass."""
    seconds: dict[str, float] = defaultdict(float)
    for op in problem.graph.operators:
        seconds[phase_of(op)] += _seconds(problem, op)
    return 1.0 + seconds["backward"] / seconds["forward"] if seconds["forward"] else 1.0


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
            own_s = [weight / places[w][1] for weight, w in zip(cut.weights, workers, strict=True)]
            sends_s = {
                (s, t): between_s(nbytes, places[workers[s]], places[workers[t]]) for (s, t), nbytes in cut.sent.items()
            }
            ends_s: list[float] = []
            for s, seconds in enumerate(own_s):
                ends_s.append(seconds + max((ends_s[r] + sends_s[r, t] for r, t in sends_s if t == s), default=0.0))
            busy_s = [sum(x for x, w in zip(own_s, workers, strict=True) if w == g) for g in range(groups)]
            busiest_s, path_s = max(*busy_s, *sends_s.values(), 0.0), max(ends_s)
            yield _Placement(busiest_s + max(0.0, path_s - busiest_s) / count, cut, places, workers)


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

    With m times the microbatches a step of T seconds whose busiest worker is busy for B of them is estimated at

        B + (T - B) / m

    for what the others do before and after it is that of one microbatch. Of each number the placement of the least
    estimate is planned, with those whose stages have as many devices, which share its plans of stages: as long as it
    may be faster than all that is planned, and than the plan at hand.

    Args:
        search: has the plans in the fewest microbatches.
        trials: plans a candidate.
        of_counts: candidates in more microbatches, by rising number.
    """
    plans, least_gain = list[Plan](), search.problem.policy.effort.least_gain
    first = {_placement(c): (plan, c) for plan, c in search.planned}
    for some in of_counts:
        fastest_s = min([search.problem.subproblem.cutoff_s, *(plan.step_time for plan, _ in search.planned)])
        estimates_s = {}
        for candidate in some:
            if (known := first.get(_placement(candidate))) is not None:
                plan, fewest = known
                busiest_s = _busiest_s(plan, fewest)
                estimates_s[candidate] = busiest_s + (plan.step_time - busiest_s) * fewest.count / candidate.count
        least = min(estimates_s, key=lambda c: estimates_s[c], default=None)
        if least is None or estimates_s[least] > (1 - least_gain) * fastest_s:
            break
        equal = [c for c in some if _sizes(c) == _sizes(least)]
        planned = trials.run([PipelineTrial(c, is_optional=True) for c in equal], cutoff_s=fastest_s)
        plans += planned
        if min(map(seconds_of, planned), default=math.inf) >= fastest_s:
            break
    return plans


def _placement(candidate: Candidate) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, int], ...]]:
    """Stages of a candidate and their devices, whatever the number of microbatches."""
    return candidate.members, candidate.devices


def _sizes(candidate: Candidate) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Stages of a candidate and their numbers of devices."""
    return candidate.members, tuple(size for _, size in candidate.devices)


def _busiest_s(plan: Plan, candidate: Candidate) -> float:
    """Seconds for which the busiest worker of a plan works."""
    busy_s: dict[tuple[int, int], float] = {}
    for stage, devices in zip(plan.stages, candidate.devices, strict=True):
        busy_s[devices] = busy_s.get(devices, 0.0) + sum(s for kind, s in stage.work_times if kind != "weight")
    return max(busy_s.values())


def _no_branches(problem: Problem) -> InfeasiblePlanError:
    stages = problem.job.num_stages
    return InfeasiblePlanError(
        f"{problem.graph.name} has no independent branches that may run side by side"
        + ("" if stages is None else f" in {stages} stages"),
        cause="every expensive operator waits for the others, or there is one device",
        remedy='schedule="auto", and num_stages="auto" where branches are asked for',
    )
