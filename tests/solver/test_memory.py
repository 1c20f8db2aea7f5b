"""Peaks, rows and the least memory, against brute force."""

from __future__ import annotations

import math

import pytest

from autopar.solver import ChoiceProblem, Edge, Node, Status, Usage, least_memory, peak_bytes, solve, usage_profile
from autopar.solver.evaluate import maximal_times
from autopar.solver.memory import broken_times, memory_floor
from tests.solver.problems import choices, ladder, plain_cost, plain_peak, random_problem, with_limit


@pytest.mark.parametrize("block", range(4))
def test_least_memory_is_the_least(block: int) -> None:
    for seed in range(2000 + 30 * block, 2030 + 30 * block):
        problem = random_problem(seed, 6)
        allowed = [c for c in choices(problem) if math.isfinite(plain_cost(problem, c))]
        wanted = min((plain_peak(problem, c) for c in allowed), default=math.inf)
        found, choice = least_memory(problem)
        assert found == wanted
        if choice:
            assert plain_peak(problem, choice) == found
            assert math.isfinite(plain_cost(problem, choice))


def test_least_memory_is_where_problems_become_feasible() -> None:
    for seed in range(20):
        problem = random_problem(seed, 6)
        least, choice = least_memory(problem)
        if choice and least > 0:
            assert solve(with_limit(problem, least)).status is Status.OPTIMAL
            assert solve(with_limit(problem, least * 0.999)).status is Status.INFEASIBLE


def test_least_memory_of_a_ladder_with_forbidden_pairs() -> None:
    problem = ladder(30, 6)
    least, choice = least_memory(problem)
    assert peak_bytes(problem, choice) == least
    pairs = tuple(Edge(e.source, e.target, [[math.inf if c > 8e-4 else c for c in row] for row in e.costs])
                  for e in problem.edges)  # fmt: skip
    harder, choice = least_memory(ChoiceProblem(problem.nodes, pairs, problem.usages))
    assert harder >= least
    assert harder == math.inf or peak_bytes(problem, choice) == harder


def test_profile_and_peak() -> None:
    problem = ChoiceProblem(
        (Node("a", [0.0, 0.0]), Node("b", [0.0])),
        (),
        (Usage(0, 0, 4, [3.0, 5.0]), Usage(1, 2, 6, [4.0]), Usage(0, 4, 5, [1.0, 2.0]), Usage(1, 3, 3, [100.0])),
    )
    times, held = usage_profile(problem, (1, 0))
    assert (times.tolist(), held.tolist()) == ([0, 2, 4, 5, 6], [5.0, 9.0, 6.0, 4.0, 0.0])
    assert peak_bytes(problem, (0, 0)) == 7.0
    assert maximal_times(problem.usages) == (2, 4)


def test_peaks_lie_at_maximal_times() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        choice = tuple(node.costs.size - 1 for node in problem.nodes)
        assert peak_bytes(problem, choice) == plain_peak(problem, choice)
        broken = broken_times(problem, choice, peak_bytes(problem, choice) * 0.9)
        assert bool(broken) == (peak_bytes(problem, choice) > 0)
        assert set(broken) <= set(maximal_times(problem.usages))


@pytest.mark.parametrize("block", range(4))
def test_no_choice_holds_less_than_the_floor(block: int) -> None:
    for seed in range(4000 + 30 * block, 4030 + 30 * block):
        problem = random_problem(seed, 6)
        floor, least = memory_floor(problem), least_memory(problem)[0]
        assert floor <= least
        if 0 < floor < math.inf:
            assert solve(with_limit(problem, floor * 0.999)).status is Status.INFEASIBLE


def test_the_floor_passes_over_what_is_forbidden() -> None:
    usages = (Usage(0, 0, 2, [1.0, 5.0]), Usage(1, 1, 3, [2.0]))
    assert memory_floor(ChoiceProblem((Node("a", [0.0, 0.0]), Node("b", [0.0])), (), usages)) == 3.0
    assert memory_floor(ChoiceProblem((Node("a", [math.inf, 0.0]), Node("b", [0.0])), (), usages)) == 7.0
    assert memory_floor(ChoiceProblem((Node("a", [math.inf, math.inf]), Node("b", [0.0])), (), usages)) == math.inf
