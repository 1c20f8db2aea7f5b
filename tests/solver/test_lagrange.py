"""The solver for large problems: honest, and never better than the optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import (
    ChoiceProblem,
    Edge,
    ExhaustiveSolver,
    Node,
    Status,
    Usage,
    is_feasible,
    objective,
    solve,
)
from autopar.solver.lagrange.contract import contract
from autopar.solver.lagrange.peaks import add_range, make_peaks
from autopar.solver.lagrange.solver import LagrangeSolver
from tests.solver.problems import dense_problem, grid, ladder, random_problem, with_usages

ROOT = Path(__file__).parents[2]
SHORT = LagrangeSolver(steps=60, rounds=6)


def following(seed: int) -> ChoiceProblem:
    """A random problem, and nodes that follow its nodes, in chains and rings, by maps that may merge strategies."""
    r = np.random.default_rng(seed)
    problem = random_problem(seed, 4)
    nodes, edges, usages = list(problem.nodes), list(problem.edges), list(problem.usages)
    for i in range(int(r.integers(1, 6))):
        v = int(r.integers(len(nodes)))
        size = nodes[v].costs.size
        strategies = int(r.integers(1, size + 2))
        follows = r.integers(0, strategies, size)
        table = np.full((size, strategies), math.inf)
        table[np.arange(size), follows] = r.integers(0, 5, size)
        nodes.append(Node(f"f{i}", r.integers(0, 5, strategies).astype(float)))
        u = len(nodes) - 1
        edges.append(Edge(v, u, table) if r.random() < 0.5 else Edge(u, v, table.T))
        usages.append(
            Usage(u, int(r.integers(0, 4)), int(r.integers(4, 9)), r.integers(0, 6, strategies).astype(float))
        )
        if r.random() < 0.3:
            w = int(r.integers(len(nodes) - 1))
            edges.append(Edge(w, u, r.integers(0, 5, (nodes[w].costs.size, strategies)).astype(float)))
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges), usages=tuple(usages))


def check(problem: ChoiceProblem, solver: LagrangeSolver = SHORT) -> bool:
    """What must hold of any answer; returns whether it is the optimum."""
    wanted, found = ExhaustiveSolver().solve(problem), solver.solve(problem)
    assert found.lower_bound <= found.objective
    if wanted.status is Status.INFEASIBLE:
        assert found.status in (Status.INFEASIBLE, Status.UNKNOWN)
        assert found.choice == ()
        return True
    assert found.status is not Status.INFEASIBLE
    assert found.lower_bound <= wanted.objective + 1e-9 * abs(wanted.objective)
    if not found.choice:
        assert found.status is Status.UNKNOWN
        return False
    assert is_feasible(problem, found.choice)
    assert found.objective == objective(problem, found.choice) >= wanted.objective
    if found.status is Status.OPTIMAL:
        assert found.objective == pytest.approx(wanted.objective, rel=1e-9, abs=1e-12)
    return found.objective <= wanted.objective + 1e-9 * abs(wanted.objective)


@pytest.mark.parametrize("block", range(3))
def test_random_problems(block: int) -> None:
    found = [check(random_problem(seed)) for seed in range(40 * block, 40 * block + 40)]
    assert sum(found) >= 38


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_problems_whose_nodes_follow_others(seed: int) -> None:
    check(following(seed))


@pytest.mark.parametrize("seed", range(12))
def test_dense_problems_under_a_limit(seed: int) -> None:
    check(with_usages(dense_problem(seed), seed, 0.1 + 0.06 * seed))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_contraction_keeps_the_optimum(seed: int) -> None:
    problem = replace(following(seed), usages=(), limit_bytes=None)
    wanted = ExhaustiveSolver().solve(problem)
    left = contract(problem)
    if left is None:
        assert wanted.status is Status.INFEASIBLE
        return
    numbers = {v: i for i, v in enumerate(sorted(left.costs))}
    nodes = tuple(Node(str(v), left.costs[v]) for v in numbers)
    edges = tuple(Edge(numbers[u], numbers[v], table) for (u, v), table in left.edges.items())
    small = ExhaustiveSolver().solve(ChoiceProblem(nodes, edges))
    assert small.objective == pytest.approx(wanted.objective)
    if wanted.choice:
        lifted = tuple(
            int(own[small.choice[numbers[at]]]) for at, own in zip(left.leader, left.strategies, strict=True)
        )
        assert objective(problem, lifted) == pytest.approx(wanted.objective)


def test_what_follows_is_taken_out() -> None:
    same = np.where(np.eye(4, dtype=np.bool_), 0.0, math.inf)
    nodes = tuple(Node(f"n{i}", np.arange(4.0) * i) for i in range(50))
    edges = tuple(Edge(i, i + 1, same) for i in range(49))
    left = contract(ChoiceProblem(nodes, edges))
    assert left is not None
    assert len(left.costs) == 1
    assert len(set(left.leader)) == 1


def test_peaks() -> None:
    r = np.random.default_rng(0)
    values = r.integers(0, 20, 37).astype(float)
    largest, added = make_peaks(values)
    for _ in range(200):
        start, stop = sorted(int(i) for i in r.integers(0, 38, 2))
        if start < stop:
            amount = float(r.integers(-9, 10))
            values[start:stop] += amount
            add_range(largest, added, start, stop, amount)
            assert largest[1] == values.max()


def test_wide_problem_under_a_limit() -> None:
    problem = with_usages(grid(6, 30, 6), 3, 0.15)
    answer = LagrangeSolver(steps=300, rounds=20).solve(problem)
    assert answer.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert is_feasible(problem, answer.choice)
    assert answer.gap < 0.03


def test_start_and_seed() -> None:
    problem = with_usages(ladder(12, 4, skip=3), 1, 0.3)
    first, second = SHORT.solve(problem, seed=5), SHORT.solve(problem, seed=5)
    assert first.choice == second.choice
    better = solve(problem).choice
    assert SHORT.solve(problem, start=better).objective <= objective(problem, better)
    stopped = SHORT.solve(problem, start=better, time_limit_s=0.0)
    assert stopped.choice and stopped.lower_bound <= stopped.objective


def test_no_nodes_and_no_choice() -> None:
    empty = SHORT.solve(ChoiceProblem((), ()))
    assert (empty.status, empty.choice, empty.objective) == (Status.OPTIMAL, (), 0.0)
    single = ChoiceProblem((Node("a", [3.0]),), (), (Usage(0, 0, 1, [5.0]),), 5.0)
    assert (SHORT.solve(single).status, SHORT.solve(single).objective) == (Status.OPTIMAL, 3.0)
    assert SHORT.solve(replace(single, limit_bytes=4.0)).status is Status.INFEASIBLE
