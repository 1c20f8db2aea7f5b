"""A first look: a choice that fits, a bound that is true, the same for the same problem, and nothing of it lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.solver import Status, solve
from autopar.solver import solve_relaxed as relaxed_if_worth
from autopar.solver.evaluate import is_feasible, objective
from autopar.solver.goal import FEW_NODES, PLAN_GAP, TINY, Goal
from autopar.solver.meter import Meter, Work
from autopar.solver.problem import ChoiceProblem
from autopar.solver.relaxation import solve_relaxed
from tests.solver.problems import dense_problem, grid, random_problem, with_usages


def _problem(seed: int) -> ChoiceProblem:
    """Random problems, two of three of them short of memory."""
    problem = random_problem(seed)
    return with_usages(problem, seed, 0.5) if seed % 3 else problem


@pytest.mark.parametrize("seed", range(24))
def test_the_optimum_lies_between_cost_and_bound(seed: int) -> None:
    problem = _problem(seed)
    wanted, relaxed = solve(problem), solve_relaxed(problem)
    assert relaxed.lower_bound <= wanted.objective + 1e-9 * max(1.0, abs(wanted.objective))
    if relaxed.choice:
        assert is_feasible(problem, relaxed.choice)
        assert relaxed.objective == pytest.approx(objective(problem, relaxed.choice))
        assert relaxed.objective >= wanted.objective - 1e-9 * max(1.0, abs(wanted.objective))
    if relaxed.status is Status.INFEASIBLE:
        assert not wanted.found
    assert solve_relaxed(problem).choice == relaxed.choice


def test_most_relaxations_find_a_choice_near_the_optimum() -> None:
    near = []
    for seed in range(24):
        wanted, relaxed = solve(_problem(seed)), solve_relaxed(_problem(seed))
        if wanted.found:
            near.append(relaxed.objective <= wanted.objective + 0.02 * abs(wanted.objective))
    assert sum(near) >= 0.8 * len(near)


@pytest.mark.parametrize("seed", range(4))
def test_a_relaxation_ends_where_its_bound_is_above_the_cutoff(seed: int) -> None:
    problem = dense_problem(seed)
    whole = solve_relaxed(problem)
    cut = solve_relaxed(problem, Goal(cutoff=whole.lower_bound / 2))
    assert cut.lower_bound > whole.lower_bound / 2
    assert cut.lower_bound <= whole.objective


@pytest.mark.parametrize("seed", range(24))
def test_a_bound_that_is_known_ends_a_relaxation_sooner_and_stays_true(seed: int) -> None:
    limited = with_usages(random_problem(seed), seed, 0.7)
    wanted, free = solve(limited), solve_relaxed(replace(limited, limit_bytes=None))
    metered = [replace(limited, meter=Meter()) for _ in range(2)]
    plain = solve_relaxed(metered[0], Goal(0.2))
    known = solve_relaxed(metered[1], Goal(0.2, least=free.lower_bound))
    assert known.lower_bound >= min(free.lower_bound, known.objective)
    assert known.lower_bound <= wanted.objective + 1e-9 * max(1.0, abs(wanted.objective))
    assert bool(known.choice) == bool(plain.choice)
    swept = [problem.meter.total().get(Work.SWEPT, 0) for problem in metered]
    assert swept[1] <= swept[0]
    hopeless = solve_relaxed(limited, Goal(cutoff=free.lower_bound - 1.0, least=free.lower_bound))
    assert hopeless.status is Status.INFEASIBLE or hopeless.lower_bound >= min(free.lower_bound, hopeless.objective)


@pytest.mark.parametrize("seed", [2, 3])
def test_relaxations_end_sooner_by_a_bound_that_is_known(seed: int) -> None:
    limited = with_usages(dense_problem(seed), seed, 0.7)
    free = solve_relaxed(replace(limited, limit_bytes=None))
    metered = [replace(limited, meter=Meter()) for _ in range(2)]
    solve_relaxed(metered[0], Goal(0.01))
    solve_relaxed(metered[1], Goal(0.01, least=free.lower_bound))
    assert metered[1].meter.total()[Work.SWEPT] < metered[0].meter.total()[Work.SWEPT]


def test_the_start_is_never_lost() -> None:
    problem = dense_problem(3)
    best = solve(problem)
    assert solve_relaxed(problem, start=best.choice, steps=1).objective <= best.objective * (1 + 1e-12)


def test_what_takes_no_longer_to_prove_gets_no_relaxation() -> None:
    problem = dense_problem(3)
    assert (relaxed_if_worth(problem, Goal(PLAN_GAP)) is None) == (problem.columns <= TINY)
    assert relaxed_if_worth(problem, Goal()) is None
    small = random_problem(1)
    assert len(small.nodes) <= FEW_NODES
    assert relaxed_if_worth(small, Goal(PLAN_GAP)) is None
    chain = grid(1, FEW_NODES + 44, 6)
    assert chain.columns > TINY and len(chain.nodes) > FEW_NODES
    assert relaxed_if_worth(chain, Goal(PLAN_GAP)) is not None
    assert relaxed_if_worth(chain, Goal(PLAN_GAP, alone=True)) is None
    assert relaxed_if_worth(replace(chain, limit_bytes=1e12), Goal(PLAN_GAP, alone=True)) is not None


@pytest.mark.slow
def test_a_known_relaxation_is_begun_from() -> None:
    """What was known stays known: the bound is no lower and the cost no higher, and what is hopeless ends at once."""
    problem = dense_problem(1)
    relaxed = solve_relaxed(problem)
    answer = solve(problem, known=relaxed, goal=Goal(PLAN_GAP))
    assert answer.objective <= relaxed.objective
    assert answer.lower_bound >= min(relaxed.lower_bound, answer.objective)
    useless = solve(problem, known=relaxed, goal=Goal(PLAN_GAP, cutoff=relaxed.lower_bound - 1.0))
    assert useless.lower_bound == relaxed.lower_bound
    assert useless.status is not Status.OPTIMAL or math.isclose(useless.objective, useless.lower_bound)
    nothing = replace(relaxed, status=Status.INFEASIBLE, choice=(), objective=math.inf, lower_bound=math.inf)
    assert solve(problem, known=nothing).status is Status.INFEASIBLE
