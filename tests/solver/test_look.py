"""A first look: a choice that fits, a bound that is true, the same for the same problem, and nothing of it lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.solver import Status, solve
from autopar.solver import first_look as look_if_worth
from autopar.solver.evaluate import is_feasible, objective
from autopar.solver.goal import FEW_NODES, PLAN_GAP, TINY, Goal
from autopar.solver.look import first_look
from autopar.solver.meter import Meter, Work
from autopar.solver.problem import ChoiceProblem
from tests.solver.problems import dense_problem, grid, random_problem, with_usages


def _problem(seed: int) -> ChoiceProblem:
    """Random problems, two of three of them short of memory."""
    problem = random_problem(seed)
    return with_usages(problem, seed, 0.5) if seed % 3 else problem


@pytest.mark.parametrize("seed", range(24))
def test_the_optimum_lies_between_cost_and_bound(seed: int) -> None:
    problem = _problem(seed)
    wanted, look = solve(problem), first_look(problem)
    assert look.lower_bound <= wanted.objective + 1e-9 * max(1.0, abs(wanted.objective))
    if look.choice:
        assert is_feasible(problem, look.choice)
        assert look.objective == pytest.approx(objective(problem, look.choice))
        assert look.objective >= wanted.objective - 1e-9 * max(1.0, abs(wanted.objective))
    if look.status is Status.INFEASIBLE:
        assert not wanted.found
    assert first_look(problem).choice == look.choice


def test_most_looks_find_a_choice_near_the_optimum() -> None:
    near = []
    for seed in range(24):
        wanted, look = solve(_problem(seed)), first_look(_problem(seed))
        if wanted.found:
            near.append(look.objective <= wanted.objective + 0.02 * abs(wanted.objective))
    assert sum(near) >= 0.8 * len(near)


@pytest.mark.parametrize("seed", range(4))
def test_a_look_ends_where_its_bound_is_above_the_cutoff(seed: int) -> None:
    problem = dense_problem(seed)
    whole = first_look(problem)
    cut = first_look(problem, Goal(cutoff=whole.lower_bound / 2))
    assert cut.lower_bound > whole.lower_bound / 2
    assert cut.lower_bound <= whole.objective


@pytest.mark.parametrize("seed", range(24))
def test_a_bound_that_is_known_ends_a_look_sooner_and_stays_true(seed: int) -> None:
    limited = with_usages(random_problem(seed), seed, 0.7)
    wanted, free = solve(limited), first_look(replace(limited, limit_bytes=None))
    metered = [replace(limited, meter=Meter()) for _ in range(2)]
    plain = first_look(metered[0], Goal(0.2))
    known = first_look(metered[1], Goal(0.2, least=free.lower_bound))
    assert known.lower_bound >= min(free.lower_bound, known.objective)
    assert known.lower_bound <= wanted.objective + 1e-9 * max(1.0, abs(wanted.objective))
    assert bool(known.choice) == bool(plain.choice)
    swept = [problem.meter.total().get(Work.SWEPT, 0) for problem in metered]
    assert swept[1] <= swept[0]
    hopeless = first_look(limited, Goal(cutoff=free.lower_bound - 1.0, least=free.lower_bound))
    assert hopeless.status is Status.INFEASIBLE or hopeless.lower_bound >= min(free.lower_bound, hopeless.objective)


@pytest.mark.parametrize("seed", [2, 3])
def test_looks_end_sooner_by_a_bound_that_is_known(seed: int) -> None:
    limited = with_usages(dense_problem(seed), seed, 0.7)
    free = first_look(replace(limited, limit_bytes=None))
    metered = [replace(limited, meter=Meter()) for _ in range(2)]
    first_look(metered[0], Goal(0.01))
    first_look(metered[1], Goal(0.01, least=free.lower_bound))
    assert metered[1].meter.total()[Work.SWEPT] < metered[0].meter.total()[Work.SWEPT]


def test_the_start_is_never_lost() -> None:
    problem = dense_problem(3)
    best = solve(problem)
    assert first_look(problem, start=best.choice, steps=1).objective <= best.objective * (1 + 1e-12)


def test_what_takes_no_longer_to_prove_gets_no_look() -> None:
    problem = dense_problem(3)
    assert (look_if_worth(problem, Goal(PLAN_GAP)) is None) == (problem.columns <= TINY)
    assert look_if_worth(problem, Goal()) is None
    small = random_problem(1)
    assert len(small.nodes) <= FEW_NODES
    assert look_if_worth(small, Goal(PLAN_GAP)) is None
    chain = grid(1, FEW_NODES + 44, 6)
    assert chain.columns > TINY and len(chain.nodes) > FEW_NODES
    assert look_if_worth(chain, Goal(PLAN_GAP)) is not None
    assert look_if_worth(chain, Goal(PLAN_GAP, alone=True)) is None
    assert look_if_worth(replace(chain, limit_bytes=1e12), Goal(PLAN_GAP, alone=True)) is not None


@pytest.mark.slow
def test_a_known_look_is_begun_from() -> None:
    """What was known stays known: the bound is no lower and the cost no higher, and what is hopeless ends at once."""
    problem = dense_problem(1)
    look = first_look(problem)
    answer = solve(problem, known=look, goal=Goal(PLAN_GAP))
    assert answer.objective <= look.objective
    assert answer.lower_bound >= min(look.lower_bound, answer.objective)
    useless = solve(problem, known=look, goal=Goal(PLAN_GAP, cutoff=look.lower_bound - 1.0))
    assert useless.lower_bound == look.lower_bound
    assert useless.status is not Status.OPTIMAL or math.isclose(useless.objective, useless.lower_bound)
    nothing = replace(look, status=Status.INFEASIBLE, choice=(), objective=math.inf, lower_bound=math.inf)
    assert solve(problem, known=nothing).status is Status.INFEASIBLE
