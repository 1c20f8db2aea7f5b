"""Mixtures of known choices: a look comes first, and HiGHS is asked once at most where a choice fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from autopar.solver import ChoiceProblem, HighsSolver, is_feasible, objective
from autopar.solver.goal import PROOF, WIDE_GAP, Goal
from autopar.solver.problem import Array
from autopar.solver.wide_memory import mix
from tests.solver.problems import grid, with_usages
from tests.solver.test_wide import CountingSolver


@dataclass
class Known:
    """Choices of a problem."""

    problem: ChoiceProblem
    choice: tuple[int, ...] | None = None
    cost: float = math.inf
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def take(self, choice: tuple[int, ...]) -> float:
        """Notes a choice; returns its cost."""
        cost = objective(self.problem, choice)
        self.seen.add(choice)
        if cost < self.cost and is_feasible(self.problem, choice):
            self.choice, self.cost = choice, cost
        return cost


def _problem() -> tuple[ChoiceProblem, Known, list[Array], float]:
    """A problem short of memory, its leanest choice, excess and the cost of the optimum."""
    problem = with_usages(grid(4, 6, 4, seed=3, coupling=0.3), 3, 0.5)
    known = Known(problem)
    best = HighsSolver().solve(problem)
    assert best.choice
    held = [np.zeros(n.costs.size) for n in problem.nodes]
    for u in problem.usages:
        held[u.node] = held[u.node] + u.bytes
    known.take(tuple(int(h.argmin()) for h in held))
    return problem, known, [n.costs - n.costs.min() for n in problem.nodes], best.objective


def _mixed(bound: float, goal: Goal = PROOF) -> tuple[Known, float, int]:
    _, known, excess, least = _problem()
    engine = CountingSolver()
    mix(known, excess, bound, engine, math.inf, 0, goal)
    return known, least, engine.calls


@pytest.mark.slow
def test_mixtures_are_cheaper_and_ask_the_engine_once_at_most() -> None:
    _, first, _, least = _problem()
    known, _, calls = _mixed(-math.inf)
    assert calls <= 1
    assert known.choice is not None and is_feasible(known.problem, known.choice)
    assert least - 1e-9 <= known.cost < first.cost
    assert known.cost <= least * (1 + WIDE_GAP)


@pytest.mark.slow
def test_nothing_is_asked_where_what_is_open_is_small() -> None:
    _, first, _, _ = _problem()
    known, _, calls = _mixed(first.cost * (1 - WIDE_GAP / 2))
    assert calls == 0 and known.seen == first.seen


@pytest.mark.slow
def test_nothing_is_asked_where_little_can_be_saved_of_what_others_take() -> None:
    _, first, _, least = _problem()
    known, _, calls = _mixed(least, Goal(cutoff=least * (1 + WIDE_GAP / 2)))
    assert calls == 0 and known.seen == first.seen
    assert _mixed(least * 0.5, Goal(cutoff=least * (1 + WIDE_GAP / 2)))[0].seen != first.seen


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_over_and_little(share: float) -> None:
    goal = Goal(cutoff=12.0, offset=2.0)  # 10 of the problem at hand
    assert goal.over(9.0, share) == pytest.approx(11.0 * share)
    assert goal.over(14.0, share) == pytest.approx(4.0 + 12.0 * share)
    assert goal.saves_little(10.0, share) and not goal.saves_little(9.0, share)
    assert not Goal().saves_little(1e300, share)


@pytest.mark.slow
def test_what_is_open_ends_highs_and_its_bound_holds() -> None:
    problem, known, _, least = _problem()
    answer = HighsSolver(open_cost=known.cost - least + 1e-6, restarts=False).solve(problem, start=known.choice)
    assert answer.lower_bound <= least + 1e-9 and answer.status.value == "feasible; not proven optimal"
