"""Presolve keeps the optimum and finds its way back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solver import ExhaustiveSolver, Status, objective, reduce_problem
from autopar.solver.compiled import is_no_sum, least_products
from autopar.solver.presolve import least_sum
from autopar.solver.workspace import NOISE, fold_constants
from tests.solver.problems import ladder, random_problem, with_limit


@pytest.mark.parametrize("block", range(4))
def test_optimum_is_preserved(block: int) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        problem = random_problem(seed)
        wanted = ExhaustiveSolver().solve(problem)
        reduction = reduce_problem(problem)
        if reduction.problem is None:
            assert wanted.status is Status.INFEASIBLE
            continue
        answer = ExhaustiveSolver().solve(reduction.problem)
        assert answer.status is wanted.status
        if answer.status is Status.OPTIMAL:
            lifted = reduction.lift(answer.choice)
            assert objective(problem, lifted) == pytest.approx(wanted.objective, rel=1e-12, abs=1e-15)
            assert answer.objective + reduction.offset == pytest.approx(wanted.objective, rel=1e-12, abs=1e-15)
            assert reduction.project(lifted) == answer.choice


def test_lift_of_any_choice_costs_no_more_than_it_says() -> None:
    for seed in range(60):
        reduction = reduce_problem(problem := with_limit(random_problem(seed), None))
        if reduction.problem is not None:
            choice = tuple(node.costs.size - 1 for node in reduction.problem.nodes)
            inner = objective(reduction.problem, choice)
            if math.isfinite(inner):
                outer = objective(problem, reduction.lift(choice))
                assert outer == pytest.approx(inner + reduction.offset, rel=1e-12, abs=1e-13)


def test_ladder_without_a_limit_leaves_nothing() -> None:
    reduction = reduce_problem(ladder(60, 10))
    assert reduction.problem is not None
    assert reduction.problem.nodes == ()


def test_nodes_in_rows_stay() -> None:
    problem = with_limit(ladder(10, 4), 1e7)
    assert len(reduce_problem(problem, ()).kept) == 0
    assert len(reduce_problem(problem, (0,)).kept) >= 10


def test_min_plus_product() -> None:
    r = np.random.default_rng(0)
    left, right = r.random((3, 5)), r.random((5, 4))
    wanted = [[min(left[i, k] + right[k, j] for k in range(5)) for j in range(4)] for i in range(3)]
    assert np.array_equal(least_sum(left, right), wanted)


def test_compiled_loops_agree_with_numpy() -> None:
    r = np.random.default_rng(1)
    for rows, columns in ((1, 1), (1, 5), (4, 1), (2, 2), (7, 3)):
        summed = r.random((rows, 1)) + r.random((1, columns))
        odd, forbidding = summed.copy(), summed.copy()
        odd[rows // 2, columns // 2] += 1e-3
        forbidding[0, -1] = math.inf
        for costs in (summed, odd, forbidding, np.zeros((rows, columns)), r.random((rows, columns))):
            assert is_no_sum(costs, NOISE) == (fold_constants(costs) is None)
            other = np.asfortranarray(r.random((columns, 3)))
            assert np.array_equal(least_products(costs, other), least_sum(costs, other))
