"""Messages, and problems too wide for elimination, against brute force and HiGHS."""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest

from autopar.solver import (
    ChoiceProblem,
    ExhaustiveSolver,
    HighsSolver,
    Solution,
    Status,
    is_feasible,
    objective,
    peak_bytes,
    reduce_problem,
    solve,
)
from autopar.solver import messages as messages_module
from autopar.solver.elimination import plan_elimination
from autopar.solver.messages import Messages
from autopar.solver.restricted import lowest
from autopar.solver.solve import solve_bounded
from autopar.solver.wide import climb
from autopar.solver.wide_memory import price_wide
from tests.solver.problems import choices, dense_problem, grid, plain_cost, with_limit, with_usages

_NARROW = 4  # entries a table, so that elimination takes next to nothing


@dataclass
class CountingSolver:
    """HiGHS, and how often it was asked."""

    calls: int = 0
    name: str = "counting"
    presolves: bool = False

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """See `HighsSolver`."""
        self.calls += 1
        return HighsSolver().solve(problem, time_limit_s=time_limit_s, start=start, seed=seed)


def exact_marginals(problem: ChoiceProblem) -> list[np.ndarray]:
    found = [np.full(node.costs.size, math.inf) for node in problem.nodes]
    for choice in choices(problem):
        cost = plain_cost(problem, choice)
        for v, k in enumerate(choice):
            found[v][k] = min(found[v][k], cost)
    return found


def test_messages_bound_and_climb_at_every_sweep() -> None:
    seen = 0
    for seed in range(12):
        problem = reduce_problem(dense_problem(seed)).problem
        if problem is None or not 0 < problem.combinations < 5000:
            continue
        seen += 1
        wanted = exact_marginals(problem)
        messages = Messages.of(problem)
        before = -math.inf
        for sweep in range(24):
            messages.sweep()
            assert before - 1e-9 <= messages.bound <= min(wanted[0]) + 1e-9
            before = messages.bound
            for found, own in zip(messages.marginals, wanted, strict=True):
                assert (found <= own + 1e-9).all()
            if sweep == 12:  # other prices of the same graph
                extra = [np.linspace(0.0, 1.0, node.costs.size) for node in problem.nodes]
                messages.reprice([n.costs + more for n, more in zip(problem.nodes, extra, strict=True)])
                wanted = exact_marginals(
                    ChoiceProblem(
                        tuple(type(n)(n.name, n.costs + more) for n, more in zip(problem.nodes, extra, strict=True)),
                        problem.edges,
                    )
                )
                before = -math.inf
    assert seen >= 4


def test_loops_in_numpy_have_the_bits_of_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = reduce_problem(dense_problem(3)).problem
    assert problem is not None
    seen = []
    for is_worth_loading in (False, True):
        monkeypatch.setattr(messages_module, "is_worth_loading", lambda *_, worth=is_worth_loading: worth)
        messages = Messages.of(problem)
        for _ in range(6):
            messages.sweep()
        seen.append((messages.bound, messages.gains, [m.tolist() for m in (*messages.slots, *messages.marginals)]))
    assert seen[0] == seen[1]


def test_messages_after_strategies_went() -> None:
    problem = reduce_problem(dense_problem(3)).problem
    assert problem is not None
    best = ExhaustiveSolver(prune=True).solve(problem)
    messages = Messages.of(problem)
    for _ in range(6):
        messages.sweep()
    kept = messages.restrict([own <= best.objective for own in messages.marginals])
    assert kept is not None
    assert all(marks[k] for marks, k in zip(kept, best.choice, strict=True))
    for _ in range(20):
        messages.sweep()
        assert messages.bound <= best.objective + 1e-9
    assert messages.restrict([np.zeros(own.size, dtype=np.bool_) for own in messages.costs]) is None


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_dense_problems(block: int) -> None:
    engine = CountingSolver()
    for seed in range(55 * block, 55 * block + 55):
        problem = reduce_problem(dense_problem(seed)).problem
        if problem is None or not problem.nodes:
            continue
        wanted = ExhaustiveSolver(prune=True).solve(problem)
        prices = climb(problem, most_entries=_NARROW)
        assert prices.bound <= wanted.objective + 1e-12
        assert wanted.objective <= prices.cost + 1e-12
        found = solve_bounded(problem, engine, most_entries=_NARROW)
        assert found.status is wanted.status
        if wanted.choice:
            assert found.objective == pytest.approx(wanted.objective, rel=1e-9, abs=1e-13)
            assert found.objective == objective(problem, found.choice)
    assert engine.calls > 0  # the relaxation of some has a gap


@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(3))
def test_dense_problems_with_memory(block: int) -> None:
    for seed in range(12 * block, 12 * block + 12):
        problem = reduce_problem(with_usages(dense_problem(seed), seed, 0.1 + 0.1 * (seed % 7))).problem
        if problem is None or not problem.usages:
            continue
        wanted = ExhaustiveSolver(prune=True).solve(problem)
        prices = price_wide(problem, HighsSolver(), most_entries=_NARROW)
        assert prices.bound <= wanted.objective + 1e-12
        assert wanted.objective <= prices.cost + 1e-12
        assert prices.choice is None or is_feasible(problem, prices.choice)
        found = solve_bounded(problem, HighsSolver(), most_entries=_NARROW)
        assert found.status is wanted.status
        if wanted.choice:
            assert is_feasible(problem, found.choice)
            assert found.objective == pytest.approx(wanted.objective, rel=1e-9, abs=1e-13)


@pytest.mark.slow
def test_a_grid_of_middle_size_like_highs() -> None:
    problem = with_limit(grid(8, 12, 6, seed=5, coupling=0.3), None)
    assert plan_elimination(problem) is None
    found, wanted = solve(problem), HighsSolver().solve(problem)
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(wanted.objective, rel=1e-7)


@pytest.mark.slow
def test_fifteen_hundred_nodes_of_width_ten() -> None:
    problem = with_limit(grid(10, 150, 16, seed=2, coupling=0.1), None)
    assert plan_elimination(problem) is None
    found = solve(problem, time_limit_s=60)
    assert found.status is Status.OPTIMAL
    assert found.objective == objective(problem, found.choice)


def test_wide_with_too_little_memory_is_infeasible() -> None:
    problem = grid(8, 12, 6, seed=1, coupling=0.3)
    least = peak_bytes(problem, tuple(0 for _ in problem.nodes)) / 100
    assert solve(with_limit(problem, least)).status is Status.INFEASIBLE


@pytest.mark.slow
def test_wide_with_memory_is_feasible_and_near() -> None:
    problem = grid(8, 24, 6, seed=1, coupling=0.3)
    free = solve(with_limit(problem, None))
    assert free.status is Status.OPTIMAL
    tight = with_limit(problem, 0.95 * peak_bytes(problem, free.choice))
    found = solve(tight)
    assert is_feasible(tight, found.choice)
    assert free.objective <= found.objective + 1e-12
    assert found.lower_bound <= found.objective
    assert found.gap < 0.02


def test_a_limit_that_is_known_to_bind_is_not_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid(8, 12, 6, seed=1, coupling=0.3)
    tight = with_limit(problem, 0.95 * peak_bytes(problem, solve(with_limit(problem, None)).choice))
    found, rounds = solve(tight), []
    module = sys.modules[solve.__module__]  # the package has a function of that name
    one = module.solve_bounded
    monkeypatch.setattr(module, "solve_bounded", lambda p, *a, **k: (rounds.append(p.usages), one(p, *a, **k))[1])
    told = solve(tight, binds=True)
    assert (told.choice, told.lower_bound) == (found.choice, found.lower_bound)
    assert [bool(usages) for usages in rounds] == [True]
    rounds.clear()
    solve(tight)
    assert [bool(usages) for usages in rounds] == [False, True]


def test_no_limit_that_a_busy_machine_reaches_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time limit, and under one that is far off, seconds decide nothing: a slow clock changes no answer."""
    problem = grid(5, 12, 6)
    problem = with_limit(problem, 0.6 * peak_bytes(problem, solve(problem).choice))
    plain = solve_bounded(problem, HighsSolver(), most_entries=500)
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 * next(ticks))
    slow = solve_bounded(problem, HighsSolver(), most_entries=500)
    assert (slow.choice, slow.lower_bound) == (plain.choice, plain.lower_bound)


def test_nodes_of_the_tree_are_a_limit() -> None:
    problem = with_usages(dense_problem(4), 4, 0.3)
    stopped, whole = HighsSolver(max_nodes=1).solve(problem), HighsSolver().solve(problem)
    assert stopped.status in (Status.FEASIBLE, Status.UNKNOWN, Status.OPTIMAL)
    assert stopped.lower_bound <= whole.objective <= stopped.objective
    wide = with_usages(grid(5, 8, 6), 2, 0.2)
    stopped = HighsSolver(max_nodes=0).solve(wide)
    assert stopped.status is not Status.INFEASIBLE
    assert stopped.lower_bound <= stopped.objective


def test_the_least_excesses_are_kept_and_the_best_of_each_node() -> None:
    excess = [np.array([0.0, 1.0, 2.0]), np.array([0.0, 5.0]), np.array([7.0, 6.0])]
    assert [marks.tolist() for marks in lowest(excess, 0)] == [[True, True, False], [True, False], [False, True]]
    assert [marks.tolist() for marks in lowest(excess, 2)] == [[True, True, True], [True, True], [False, True]]
