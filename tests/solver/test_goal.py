"""When a solver stops: at a gap that is good enough, and at a bound that makes an answer useless."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.search.alpa import alpa
from autopar.search.outcome import Bounded
from autopar.solver import ChoiceProblem, HighsSolver, Status, solve
from autopar.solver.evaluate import is_feasible, objective
from autopar.solver.goal import PROOF, Goal
from autopar.solver.presolve import reduce_problem
from autopar.solver.problem import Edge, Node
from autopar.solver.solve import solve_bounded
from examples import mlp
from tests.search.problems import problem_of, toy
from tests.solver.problems import dense_problem, random_problem, with_usages
from tests.solver.test_wide import CountingSolver

#: The module: the package has its function under the name.
SOLVE = sys.modules["autopar.solver.solve"]


def test_the_words() -> None:
    goal = Goal(0.1, 100.0)
    assert goal.reached(10.0, 9.0) and not goal.reached(10.0, 8.9)
    assert not goal.reached(math.inf, -math.inf)
    assert goal.hopeless(100.1) and not goal.hopeless(100.0)
    # 90 of the cost are certain: what is left open is a small part of the whole, and the cutoff is of the whole.
    assert goal.less(90.0).reached(10.0, 0.0)
    assert goal.less(90.0).hopeless(10.1) and not goal.less(90.0).hopeless(10.0)
    assert goal.less(30.0).less(60.0) == goal.less(90.0)


def short_of_memory() -> Iterator[ChoiceProblem]:
    """Dense problems that presolve leaves something of, under a limit."""
    for seed in range(40):
        problem = reduce_problem(with_usages(dense_problem(seed), seed, 0.3)).problem
        if problem is not None and problem.usages:
            yield problem


@pytest.mark.parametrize("seed", range(30))
def test_a_gap_is_kept_and_the_bound_true(seed: int) -> None:
    problem = random_problem(seed)
    wanted = solve(problem)
    answer = solve(problem, goal=Goal(0.05))
    assert answer.found == wanted.found
    if wanted.found:
        assert answer.lower_bound <= wanted.objective + 1e-12
        assert answer.objective - answer.lower_bound <= 0.05 * abs(answer.objective) + 1e-12


@pytest.mark.parametrize("seed", range(30))
def test_a_cutoff_gives_up_only_what_costs_more(seed: int) -> None:
    problem = random_problem(seed)
    wanted = solve(problem)
    if not wanted.found:
        return
    above = solve(problem, goal=Goal(cutoff=wanted.objective))
    assert above.objective == pytest.approx(wanted.objective, rel=1e-9, abs=1e-15)
    below = solve(problem, goal=Goal(cutoff=wanted.objective - 0.1 * abs(wanted.objective) - 1e-12))
    assert below.lower_bound <= wanted.objective + 1e-12
    assert below.status is not Status.INFEASIBLE


@pytest.mark.parametrize("seed", range(30))
def test_what_is_given_up_is_not_called_solved(seed: int) -> None:
    """Rows of the limit are added where a choice breaks them: without all of them a choice is optimal for no one."""
    problem = with_usages(random_problem(seed), seed, 0.5)
    given_up = solve(problem, goal=Goal(cutoff=-math.inf), binds=False)
    assert given_up.found == bool(given_up.choice)
    if given_up.found:
        assert is_feasible(problem, given_up.choice)


@pytest.mark.slow
def test_the_engine_is_not_asked_for_what_is_close_or_useless() -> None:
    asked = 0
    for problem in short_of_memory():
        plain, given_up = CountingSolver(), CountingSolver()
        answer = solve_bounded(problem, plain)
        if not plain.calls or answer.status is not Status.OPTIMAL:
            continue
        asked += plain.calls
        useless = solve_bounded(problem, given_up, goal=Goal(cutoff=-math.inf))
        assert given_up.calls == 0
        assert useless.status in (Status.FEASIBLE, Status.UNKNOWN)
        assert useless.lower_bound <= answer.objective + 1e-12
    assert asked > 0


def test_a_large_problem_within_the_gap_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SOLVE, "TINY", 0)
    for problem in short_of_memory():
        engine = CountingSolver()
        solve_bounded(problem, engine)
        bounds = solve_bounded(problem, HighsSolver(), goal=Goal(gap=math.inf))
        if engine.calls and bounds.choice:
            loose = CountingSolver()
            assert solve_bounded(problem, loose, goal=Goal(gap=math.inf)).status is Status.FEASIBLE
            assert loose.calls == 0
            return
    pytest.fail("no problem needs the engine")


@pytest.mark.slow
def test_a_mesh_that_costs_more_is_given_up() -> None:
    plan = alpa(problem_of(*mlp.build(abstract=True), toy(4)))
    (chosen,) = (c for c in plan.search.considered if c.note == "chosen")
    left_out = [c for c in plan.search.considered if "left out: its bound is above what is known" in c.name]
    assert all(c.step_time is None for c in left_out)
    others = [c.step_time for c in plan.search.considered if c is not chosen and c.step_time is not None]
    assert all(other >= chosen.step_time for other in others)
    assert isinstance(alpa(problem_of(*mlp.build(abstract=True), toy(4), cutoff_s=plan.step_time / 2)), Bounded)
    assert (
        alpa(problem_of(*mlp.build(abstract=True), toy(4), cutoff_s=plan.step_time * 1.01)).step_time == plan.step_time
    )


def test_a_large_program_is_left_out_where_little_could_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = Goal(gap=1e-9)
    left_out = 0
    for problem in short_of_memory():
        asked, spared = CountingSolver(), CountingSolver()
        exact = solve_bounded(problem, asked, goal=goal)
        with monkeypatch.context() as changed:
            changed.setattr(SOLVE, "WIDE_GAP", math.inf)
            changed.setattr(SOLVE, "_FEW_COLUMNS", 0)
            near = solve_bounded(problem, spared, goal=goal)
        if asked.calls and not spared.calls:
            left_out += 1
            assert near.choice
            assert near.lower_bound <= exact.objective + 1e-12
            assert near.objective >= exact.objective - 1e-12
    assert left_out > 0


def test_a_wide_program_without_memory_rows_ends_with_an_honest_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked for narrow programs alone; of wider ones what messages say is the answer."""
    draw = np.random.default_rng(5)
    nodes = tuple(Node(f"n{i}", draw.random(4)) for i in range(11))
    pairs = [(a, b) for a in range(11) for b in range(a + 1, 11) if draw.random() < 0.8]
    problem = ChoiceProblem(nodes, tuple(Edge(a, b, draw.random((4, 4))) for a, b in pairs), (), None)
    goal, asked, spared = Goal(gap=1e-9), CountingSolver(), CountingSolver()
    exact = solve_bounded(problem, asked, most_entries=1, goal=goal)
    assert exact.status is Status.OPTIMAL and asked.calls
    with monkeypatch.context() as changed:
        changed.setattr(SOLVE, "_FEW_COLUMNS", 0)
        ended = solve_bounded(problem, spared, most_entries=1, goal=goal)
    assert ended.status is Status.FEASIBLE and not spared.calls
    assert ended.lower_bound <= exact.objective + 1e-9 and ended.objective >= exact.objective - 1e-9
    assert ended.objective == pytest.approx(objective(problem, ended.choice))
    assert solve_bounded(problem, spared, most_entries=1, goal=PROOF).status is Status.OPTIMAL  # a proof is a proof
