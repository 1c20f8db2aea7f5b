"""Every route against trying all combinations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import (
    ChoiceProblem,
    Edge,
    ExhaustiveSolver,
    HighsSolver,
    Node,
    SolverError,
    Status,
    Usage,
    is_feasible,
    objective,
    peak_bytes,
    solve,
    solver_named,
)
from tests.solver.problems import choices, ladder, plain_cost, plain_peak, random_problem, with_limit


def same_optimum(problem: ChoiceProblem, found: object, wanted: object) -> None:
    assert found.status is wanted.status
    if wanted.status is Status.OPTIMAL:
        assert is_feasible(problem, found.choice)
        assert found.objective == pytest.approx(wanted.objective, rel=1e-9, abs=1e-13)
        assert found.lower_bound <= found.objective
        assert found.objective == objective(problem, found.choice)


@pytest.mark.few(6)
@pytest.mark.parametrize("block", range(8))
def test_highs_finds_what_exhaustive_finds(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        problem = random_problem(seed)
        wanted = ExhaustiveSolver().solve(problem)
        same_optimum(problem, solve(problem), wanted)
        same_optimum(problem, HighsSolver().solve(problem), wanted)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 1.0))
def test_limits_from_tight_to_loose(seed: int, part: float) -> None:
    problem = with_limit(random_problem(seed, 10), None)
    free = solve(problem)
    if free.status is Status.OPTIMAL:
        problem = with_limit(problem, part * peak_bytes(problem, free.choice))
        wanted = ExhaustiveSolver().solve(problem)
        same_optimum(problem, solve(problem), wanted)
        same_optimum(problem, solve(problem, binds=True), wanted)
        same_optimum(problem, solve(problem, "exhaustive"), wanted)
        assert not free.objective > wanted.objective + 1e-9 * abs(wanted.objective)


def test_exhaustive_is_the_definition() -> None:
    for seed in range(40):
        problem = random_problem(seed, 5)
        allowed = [
            plain_cost(problem, c)
            for c in choices(problem)
            if problem.limit_bytes is None or plain_peak(problem, c) <= problem.limit_bytes
        ]
        least = min(allowed, default=math.inf)
        for oracle in (ExhaustiveSolver(), ExhaustiveSolver(prune=True)):
            answer = oracle.solve(problem)
            assert answer.objective == pytest.approx(least, rel=1e-12)
            assert (answer.status is Status.INFEASIBLE) == math.isinf(least)


def test_exhaustive_beyond_one_block() -> None:
    problem = with_limit(ladder(3, 5, seed=3), None)
    problem = with_limit(problem, 0.8 * peak_bytes(problem, solve(problem).choice))
    same_optimum(problem, ExhaustiveSolver(prune=True).solve(problem), solve(problem))


def test_exhaustive_refuses_what_is_too_large() -> None:
    with pytest.raises(SolverError, match="10 combinations"):
        ExhaustiveSolver(max_combinations=10).solve(ladder(2, 3))


@pytest.mark.slow
def test_thousand_nodes_with_skips() -> None:
    problem = ladder(333, 16, skip=4)
    answer = solve(problem)
    assert answer.status is Status.OPTIMAL
    assert answer.gap < 1e-6
    assert answer.objective == objective(problem, answer.choice)


def test_ladder_under_a_limit() -> None:
    problem = ladder(40, 8, seed=1)
    free = solve(problem)
    tight = with_limit(problem, 0.9 * peak_bytes(problem, free.choice))
    answer = solve(tight)
    assert answer.status is Status.OPTIMAL
    assert is_feasible(tight, answer.choice)
    assert answer.objective > free.objective


def test_same_input_same_choice() -> None:
    problem = with_limit(ladder(20, 8, skip=3), 5e7)
    assert solve(problem).choice == solve(problem).choice


def test_no_nodes() -> None:
    for solver in ("highs", "exhaustive"):
        answer = solve(ChoiceProblem((), ()), solver)
        assert (answer.status, answer.choice, answer.objective) == (Status.OPTIMAL, (), 0.0)


def test_time_limit_is_honest() -> None:
    problem = ladder(60, 12, skip=3)
    problem = with_limit(problem, 0.9 * peak_bytes(problem, solve(problem).choice))
    stopped = solve(problem, time_limit_s=0.0)
    assert stopped.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert stopped.lower_bound <= stopped.objective
    assert (stopped.status is Status.UNKNOWN) == (not stopped.choice)
    assert HighsSolver().solve(problem, time_limit_s=0.0).status is Status.UNKNOWN
    assert ExhaustiveSolver().solve(random_problem(1), time_limit_s=-1.0).status is Status.UNKNOWN


def test_feasible_start_is_never_lost() -> None:
    problem = ladder(8, 4, skip=3)
    start = tuple(0 for _ in problem.nodes)
    problem = with_limit(problem, peak_bytes(problem, start))
    for answer in (solve(problem, start=start, time_limit_s=0.0), HighsSolver().solve(problem, start=start)):
        assert answer.status in (Status.FEASIBLE, Status.OPTIMAL)
        assert answer.objective <= objective(problem, start)


def test_highs_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    HighsSolver().solve(with_limit(ladder(4, 4, skip=2), 3e7))
    assert capfd.readouterr() == ("", "")


def test_tiny_overrun_is_no_fit() -> None:
    # The cheap pair exceeds the limit by a part in 10^10, below any tolerance of HiGHS.
    nodes = (Node("a", [0.0, 1.0]), Node("b", [0.0, 1.5]))
    usages = (Usage(0, 0, 2, [5e9, 1.0]), Usage(1, 0, 2, [5e9 + 1, 1.0]))
    problem = ChoiceProblem(nodes, (), usages, 1e10)
    for answer in (solve(problem), HighsSolver().solve(problem)):
        assert (answer.status, answer.choice) == (Status.OPTIMAL, (1, 0))


def test_forbidden_everything() -> None:
    problem = ChoiceProblem((Node("a", [0.0]), Node("b", [0.0])), (Edge(0, 1, [[math.inf]]),))
    for answer in (solve(problem), HighsSolver().solve(problem), ExhaustiveSolver().solve(problem)):
        assert (answer.status, answer.choice, answer.objective) == (Status.INFEASIBLE, (), math.inf)


def test_unknown_solver() -> None:
    with pytest.raises(SolverError, match="'simplex'"):
        solver_named("simplex")
