"""Elimination and multipliers against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solver import ChoiceProblem, Edge, ExhaustiveSolver, Node, reduce_problem
from autopar.solver.elimination import plan_elimination
from autopar.solver.multipliers import price_memory
from tests.solver.problems import choices, plain_cost, plain_peak, random_problem, with_limit


@pytest.mark.parametrize("block", range(3))
def test_elimination_and_its_marginals(block: int) -> None:
    for seed in range(3000 + 20 * block, 3020 + 20 * block):
        problem = with_limit(random_problem(seed, 6), None)
        marginals = [np.full(node.costs.size, math.inf) for node in problem.nodes]
        for choice in choices(problem):
            for v, k in enumerate(choice):
                marginals[v][k] = min(marginals[v][k], plain_cost(problem, choice))
        elimination = plan_elimination(problem)
        assert elimination is not None
        least, choice, tables = elimination.least([node.costs for node in problem.nodes])
        assert least == pytest.approx(min(marginals[0]), rel=1e-12, abs=1e-15)
        if math.isfinite(least):
            assert plain_cost(problem, choice) == pytest.approx(least, rel=1e-12, abs=1e-15)
            for found, wanted in zip(elimination.marginals(least, tables), marginals, strict=True):
                assert np.allclose(found, wanted, rtol=1e-12, atol=1e-12 * abs(least))


def test_prices_bound_every_choice_that_fits() -> None:
    for seed in range(3100, 3180):
        reduction = reduce_problem(random_problem(seed, 6))
        problem = reduction.problem
        if problem is None or not problem.usages or ExhaustiveSolver().solve(problem).choice == ():
            continue
        elimination = plan_elimination(problem)
        assert elimination is not None
        prices = price_memory(problem, elimination)
        assert prices.bound <= ExhaustiveSolver().solve(problem).objective <= prices.cost
        for choice in choices(problem):
            if plain_peak(problem, choice) <= (problem.limit_bytes or 0.0):
                cost = plain_cost(problem, choice)
                assert all(prices.marginals[v][k] <= cost for v, k in enumerate(choice))


def test_wide_problems_are_left_to_the_solver() -> None:
    nodes = tuple(Node(f"n{i}", np.zeros(10)) for i in range(8))
    edges = tuple(Edge(i, j, np.eye(10)) for i in range(8) for j in range(i))
    assert plan_elimination(ChoiceProblem(nodes, edges)) is None
