"""Overlap in the objective: of a conversion that computation may hide only a share of its seconds is a cost.

In the schedule of an answer a conversion between two operators may overlap as long as links are idle between the
operator that makes the value and the one that reads it. Conversions compete for that time, so each pays a share of the
seconds that it hides: the price of a second of the links. With so much taken off the costs of every edge the integer
program is linear as before. Its answer is scheduled, and is taken if its step is shorter; the schedule of the best
answer gives the next costs. That does not lead from the least sum of seconds to answers whose gradients overlap well.
Other beginnings are data parallelism, and the answer for which conversions of parameters and gradients cost a share of
their seconds. Costs of edges do not tell which collectives are sent as one, nor which operators wait for the last of
them. Conversions that a step waits for are therefore ruled out one by one, and the rest is solved again.
`improve_overlap` is the place to start.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.state_flow import StateFlow
from autopar.search.intra.extract import Sharding, extract
from autopar.search.intra.overlap import RegionSchedule, StepSchedules, producers_of, region_of
from autopar.search.intra.sharding_problem import ShardingProblem, ValueDraft
from autopar.search.intra.thresholds import with_thresholds
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem, Edge, Solution, is_feasible, with_allowed
from autopar.solver.evaluate import objective


@dataclass(frozen=True)
class TimedSolution:
    """An answer with its step.

    Args:
        solution: the choice; its objective is the sum of all seconds.
        sharding: what it means.
    """

    solution: Solution
    sharding: Sharding

    @property
    def step_s(self) -> float:
        """Seconds of a step, what computation hides left out."""
        return step_s(self.sharding)


def step_s(sharding: Sharding) -> float:
    """Seconds of a step of a sharding."""
    return sharding.compute_s + sharding.exposed_s + sharding.host_s + sharding.starts_s


def improve_overlap(
    problem: Problem,
    sharding_problem: ShardingProblem,
    first: TimedSolution,
    solve: Callable[[ChoiceProblem, tuple[int, ...]], Solution],
) -> TimedSolution:
    """The best of an answer and those that follow from its schedule.

    Args:
        problem: what is planned.
        sharding_problem: its statement on the mesh of the answer.
        first: the answer.
        solve: solves a problem of the same nodes, from a choice that fits, or from none.
    """
    if not problem.cost_model.overlaps or not _stalls(problem, first):
        return first
    tried, lower_bound = {first.solution.choice}, first.solution.lower_bound
    best = _chain(problem, sharding_problem, first, solve, tried)
    start = with_shared_examples(problem, sharding_problem, solve, lower_bound)
    if start is not None and start.step_s < first.step_s and start.solution.choice not in tried:
        other = _chain(problem, sharding_problem, start, solve, tried)
        best = other if other.step_s < best.step_s * (1 - 1e-9) else best
    if problem.subproblem.separate_programs:
        return best
    ends = [best]
    start = with_state_hidden(problem, sharding_problem, solve, lower_bound)
    if start is not None and start.solution.choice not in tried:
        other = _chain(problem, sharding_problem, start, solve, tried)
        ends += [other] if other.step_s < best.step_s * (1 - 1e-9) else []
    # An answer from which more may be ruled out may end below one that is shorter before.
    ends = [_rule_out_exposed(problem, sharding_problem, end, solve, tried) for end in ends]
    return min(ends, key=lambda end: end.step_s)


def _stalls(problem: Problem, timed: TimedSolution) -> bool:
    """Whether a step waits for collectives for longer than an answer may."""
    return timed.sharding.exposed_s > problem.policy.overlap.stall_share * timed.step_s


def _chain(
    problem: Problem,
    sharding_problem: ShardingProblem,
    first: TimedSolution,
    solve: Callable[[ChoiceProblem, tuple[int, ...]], Solution],
    tried: set[tuple[int, ...]],
) -> TimedSolution:
    """The best of an answer and those that follow from its schedule; adds the choices of all to ``tried``."""
    best, overlappable = first, None
    for share in problem.policy.overlap.link_shares:
        if not _stalls(problem, best):
            break
        overlappable = overlappable or overlappable_s(problem, sharding_problem, best)
        solution = solve(with_overlap(sharding_problem.problem, overlappable, share), best.solution.choice)
        if not solution.found or solution.choice in tried:
            continue
        tried.add(solution.choice)
        timed = _timed(problem, sharding_problem, solution, first.solution.lower_bound)
        if timed.step_s < best.step_s * (1 - 1e-9):
            best, overlappable = timed, None
    return best


def _rule_out_exposed(
    problem: Problem,
    sharding_problem: ShardingProblem,
    first: TimedSolution,
    solve: Callable[[ChoiceProblem, tuple[int, ...]], Solution],
    tried: set[tuple[int, ...]],
) -> TimedSolution:
    """The best of an answer and those without layouts for which its step waits, the longest wait first.

    Each layout is ruled out once; one without which the step is shorter stays ruled out. ``tried`` has the choices that
    were timed.
    """
    best, lower_bound = _joined(problem, sharding_problem, first), first.solution.lower_bound
    choices, done = sharding_problem.problem, set[tuple[str, bool]]()
    while _stalls(problem, best) and len(done) < problem.policy.overlap.most_ruled_out:
        of, rest = next(_without_exposed(problem, sharding_problem, best, choices, done), (None, choices))
        if of is None:
            break
        done.add(of)
        solution = solve(rest, ())
        if solution.choice in tried or not (solution.found and is_feasible(rest, solution.choice)):
            continue
        tried.add(solution.choice)
        timed = _joined(problem, sharding_problem, _timed(problem, sharding_problem, solution, lower_bound))
        if timed.step_s < (1 - problem.policy.effort.least_gain) * best.step_s:
            best, choices = timed, rest
    return best


def _joined(problem: Problem, sharding_problem: ShardingProblem, timed: TimedSolution) -> TimedSolution:
    """An answer whose collectives are joined up to the thresholds that suit it."""
    choice, sharding = timed.solution.choice, timed.sharding
    return replace(timed, sharding=with_thresholds(problem, sharding_problem, choice, sharding))


def _without_exposed(
    problem: Problem,
    sharding_problem: ShardingProblem,
    timed: TimedSolution,
    choices: ChoiceProblem,
    done: Collection[tuple[str, bool]],
) -> Iterator[tuple[tuple[str, bool], ChoiceProblem]]:
    """Problems without one layout of an answer, the one first for which its step waits longest.

    Of each value the layout is ruled out to which its readers convert it, then the layout in which it is made. Left are
    values for which a step waits no longer than it may wait in all.

    Args:
        problem: what is planned.
        sharding_problem: its statement on the mesh of the answer.
        timed: the answer.
        choices: the problem that it solves.
        done: values whose layout was ruled out, and whether that of their readers.
    """
    choice, exposed_s = timed.solution.choice, defaultdict[str, float](float)
    times = timed.sharding.times
    for collective, seconds in zip(times.sent, times.exposed_s, strict=True):
        exposed_s[collective.value] += seconds
    least_s = problem.policy.overlap.stall_share * timed.step_s
    for key in sorted(exposed_s, key=lambda key: (-exposed_s[key], key)):
        value = sharding_problem.values.get(key)
        if exposed_s[key] <= least_s or value is None or value.node is None:
            continue
        present = value.layouts[choice[value.node]]
        of_maker = {value.node: np.array([k != present for k in value.layouts])}
        for of_readers, allowed in ((True, _other_reader_layouts(value, choice)), (False, of_maker)):
            if (key, of_readers) in done or not allowed:
                continue
            restricted = with_allowed(choices, allowed)
            if all(np.isfinite(restricted.nodes[n].costs).any() for n in allowed):
                yield (key, of_readers), restricted


def _other_reader_layouts(value: ValueDraft, choice: Sequence[int]) -> dict[int, NDArray[np.bool_]]:
    """By node of a reader that converts a value, for each strategy whether it takes the value in another layout."""
    allowed: dict[int, NDArray[np.bool_]] = {}
    present = None if value.node is None else value.layouts[choice[value.node]]
    for use in value.uses:
        required = use.required[choice[use.node]]
        if required != present:
            allowed[use.node] = allowed.get(use.node, True) & np.array([k != required for k in use.required])
    return allowed


def _timed(
    problem: Problem, sharding_problem: ShardingProblem, solution: Solution, lower_bound: float
) -> TimedSolution:
    """An answer to other costs, with the sum of all seconds, which has a bound."""
    summed = replace(solution, objective=objective(sharding_problem.problem, solution.choice), lower_bound=lower_bound)
    return TimedSolution(summed, extract(problem, sharding_problem, solution.choice))


def with_shared_examples(
    problem: Problem,
    sharding_problem: ShardingProblem,
    solve: Callable[[ChoiceProblem, tuple[int, ...]], Solution],
    lower_bound: float,
) -> TimedSolution | None:
    """An answer of another kind: examples over all devices, parameters whole, the rest as is cheapest.

    Of collectives of gradients more hides than of those of activations, and more are sent as one. The sum of all
    seconds tells neither.

    Args:
        problem: what is planned.
        sharding_problem: its statement on a mesh.
        solve: solves a problem of the same nodes, from a choice that fits, or from none.
        lower_bound: of the sum on this mesh.
    """
    masked = None if problem.subproblem.separate_programs else _data_parallel(problem, sharding_problem)
    solution = None if masked is None else solve(masked, ())
    if solution is None or not solution.found:
        return None
    return _timed(problem, sharding_problem, solution, lower_bound)


def _data_parallel(problem: Problem, sharding_problem: ShardingProblem) -> ChoiceProblem | None:
    """The problem with what is no data parallelism ruled out; None where the mesh does not divide the examples."""
    roles = {i.name: i.role for i in problem.graph.inputs}
    allowed: dict[int, NDArray[np.bool_]] = {}
    axes = {a for a, n in sharding_problem.mesh.axes if n > 1}
    for v in sharding_problem.values.values():
        if v.node is None or roles.get(v.source) not in ("batch", "parameter"):
            continue
        if roles[v.source] == "parameter":
            ok = [k.is_replicated for k in v.layouts]
        else:
            ok = [bool(k.dims) and set(k.dims[0]) == axes and not any(k.dims[1:]) for k in v.layouts]
        if not any(ok):
            return None
        allowed[v.node] = allowed.get(v.node, True) & np.array(ok)
    return with_allowed(sharding_problem.problem, allowed)


def with_state_hidden(
    problem: Problem,
    sharding_problem: ShardingProblem,
    solve: Callable[[ChoiceProblem, tuple[int, ...]], Solution],
    lower_bound: float,
) -> TimedSolution | None:
    """An answer of another kind: conversions of parameters and gradients cost as little as if nearly all were hidden.

    More of these than of activations' hide, and more are sent as one. The sum of all seconds tells neither, and a
    schedule only of an answer that has them. None in stages of pipelines.

    Args:
        problem: what is planned.
        sharding_problem: its statement on a mesh.
        solve: solves a problem of the same nodes, from a choice that fits, or from none.
        lower_bound: of the sum on this mesh.
    """
    shares = problem.policy.overlap.link_shares
    if problem.subproblem.separate_programs or not shares:
        return None
    hidden = dict.fromkeys(_edges_of_state(problem, sharding_problem), math.inf)
    solution = solve(with_overlap(sharding_problem.problem, hidden, shares[0]), ())
    return _timed(problem, sharding_problem, solution, lower_bound) if solution.found else None


def _edges_of_state(problem: Problem, sharding_problem: ShardingProblem) -> Iterator[tuple[int, int]]:
    """Edges on which parameters, gradients and what the update reads are converted, with those of shared copies."""
    flow, hubs = problem.graph.fact(StateFlow.of), _hubs(sharding_problem)
    for v in sharding_problem.values.values():
        is_state = v.key in flow.parameters or v.key in flow.gradients
        for use in v.uses if v.node is not None else ():
            if v.node is not None and (is_state or use.phase == "update"):
                yield _edge(v.node, use.node)
                for hub in hubs[v.key]:
                    yield _edge(v.node, hub)
                    yield _edge(hub, use.node)


def _hubs(sharding_problem: ShardingProblem) -> Mapping[str, list[int]]:
    """Nodes of the shared copies of each value."""
    hubs: dict[str, list[int]] = defaultdict(list)
    for c in sharding_problem.copies:
        hubs[c.key].append(c.node)
    return hubs


def with_overlap(
    problem: ChoiceProblem, overlappable: dict[tuple[int, int], float], share: float = 0.0
) -> ChoiceProblem:
    """The problem with less on its edges.

    Args:
        problem: as it is.
        overlappable: by the nodes of an edge the seconds that may be hidden of any conversion between them.
        share: of what is hidden that is paid still.
    """
    edges = []
    for e in problem.edges:
        hidden_s = np.minimum(e.costs, overlappable.get((e.source, e.target), 0.0))
        hidden_s[np.isinf(e.costs)] = 0.0  # what is forbidden stays so
        edges.append(Edge(e.source, e.target, e.costs - (1.0 - share) * hidden_s))
    return replace(problem, edges=tuple(e for e in edges if e.costs.any()))


def overlappable_s(
    problem: Problem, sharding_problem: ShardingProblem, timed: TimedSolution
) -> dict[tuple[int, int], float]:
    """Seconds a step in which links are idle between maker and reader, by edge.

    Args:
        problem: what is planned.
        sharding_problem: from `build`.
        timed: the answer whose schedule is looked at.
    """
    schedules = timed.sharding.times.schedules
    if schedules is None or timed.sharding.times.matmuls:  # windows are those of whole products
        schedules = StepSchedules(problem.cost_model, sharding_problem, timed.solution.choice, timed.sharding.sent)
    windows = {region: LinkIdleTime(of) for region, of in schedules.of().items()}
    regions, producers = {r.id for r in sharding_problem.region_sites}, producers_of(sharding_problem)
    hubs = _hubs(sharding_problem)
    overlappable: dict[tuple[int, int], float] = defaultdict(float)
    for v in sharding_problem.values.values():
        if v.node is None:
            continue
        window, producer = windows[region_of(v.key, regions)], producers.get(v.key, "")
        for use in v.uses:
            idle_s = window.idle_s(producer, use.consumer)
            overlappable[_edge(v.node, use.node)] += idle_s
            for hub in hubs[v.key]:
                overlappable[_edge(hub, use.node)] += idle_s
                before = overlappable.get(_edge(v.node, hub))
                overlappable[_edge(v.node, hub)] = idle_s if before is None else min(before, idle_s)
    return dict(overlappable)


def _edge(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


class LinkIdleTime:
    """Times in which links of a region are idle.

    Args:
        of: the schedule of the region.
    """

    def __init__(self, of: RegionSchedule) -> None:
        self.timing = of.timing
        self.transfer_s: dict[tuple[str, str], float] = defaultdict(float)
        spans = []
        for transfer, start in zip(of.transfers, of.timing.carried_s, strict=True):
            self.transfer_s[transfer.producer, transfer.consumer] += transfer.seconds
            spans.append((start, start + transfer.seconds))
        self.starts, self.stops = np.array(sorted(spans), float).reshape(-1, 2).T

    def idle_s(self, producer: str, consumer: str) -> float:
        """Seconds between the end of one operator and the start of another in which no link is busy for others."""
        begin = self.timing.ends_s.get(producer, 0.0)
        end = self.timing.starts_s.get(consumer, self.timing.seconds)
        if end <= begin:
            return 0.0
        busy = np.clip(np.minimum(self.stops, end) - np.maximum(self.starts, begin), 0.0, None).sum()
        wait_s = self.timing.stall_s.get(consumer, 0.0)
        return max(0.0, end - begin - wait_s - max(0.0, float(busy) - self.transfer_s[producer, consumer]))
