"""The stated problem means what the documentation says, and is solved to the optimum, on random graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import CostModel
from autopar.search import Job, Problem
from autopar.search.bound import work_bound_s
from autopar.search.intra import ShardingProblem, build, extract
from autopar.solver import (
    ChoiceProblem,
    ExhaustiveSolver,
    HighsSolver,
    Status,
    least_memory,
    peak_bytes,
    solve,
)
from tests.search.meaning import least, least_by_trying, least_seconds
from tests.search.problems import toy
from tests.search.programs import MOST_OPERATORS, count, primitives, random_graph

#: Mesh, most operators of its graphs (on two axes an operator has many strategies), number of graphs.
MESHES = {(2,): (MOST_OPERATORS, 120), (4,): (MOST_OPERATORS, 120), (2, 2): (6, 80)}
CASES = [(mesh, number) for mesh, (_, graphs) in MESHES.items() for number in range(graphs)]
#: Most combinations that every one of is tried.
MOST_COMBINATIONS = 300_000


@lru_cache(maxsize=8)
def drawn(mesh_shape: tuple[int, ...], number: int) -> tuple[Problem, ShardingProblem]:
    """A problem of which all combinations can be tried."""
    most, _ = MESHES[mesh_shape]
    rng = np.random.default_rng((*mesh_shape, number))
    cluster = toy(int(np.prod(mesh_shape)), bandwidth=float(rng.choice([1e8, 1e9, 1e10])), latency_s=1e-8)
    (mesh,) = cluster.logical_meshes(mesh_shape)
    while True:
        problem = Problem(random_graph(rng, most), cluster, CostModel(cluster), job=Job())
        sharding_problem = build(problem, mesh)
        if sharding_problem.problem.combinations <= MOST_COMBINATIONS:
            return problem, sharding_problem


def unlimited(problem: ChoiceProblem) -> ChoiceProblem:
    return replace(problem, limit_bytes=None)


@pytest.mark.few(38)
@pytest.mark.parametrize(("mesh_shape", "number"), CASES)
def test_optimum(mesh_shape, number):
    """All combinations, the second statement, the solver and what the plan records agree."""
    problem, sharding_problem = drawn(mesh_shape, number)
    free = unlimited(sharding_problem.problem)
    best = ExhaustiveSolver().solve(free)
    # What bounds pipelines is below the optimum of one stage as well, and of most graphs not far below.
    assert work_bound_s(problem.graph, problem.cost_model) <= best.objective * (1 + 1e-9)
    ours = solve(free)
    assert ours.status is Status.OPTIMAL
    assert ours.objective == pytest.approx(best.objective, rel=1e-9, abs=1e-18)
    assert ours.lower_bound <= best.objective * (1 + 1e-9)
    meant = least_seconds(problem.graph, sharding_problem.mesh, problem.cost_model)
    assert ours.objective == pytest.approx(meant, rel=1e-9, abs=1e-18)
    sharding = extract(problem, sharding_problem, ours.choice)
    assert sharding.compute_s + sharding.communication_s <= ours.objective * (1 + 1e-9)
    within_memory(free, ours.choice, share=(0.0, 0.3, 0.8)[number % 3])


def within_memory(free: ChoiceProblem, choice: tuple[int, ...], share: float) -> None:
    """Under a limit between the least peak and that of the best choice the solvers agree; under less nothing fits."""
    most = peak_bytes(free, choice)
    fewest, frugal = least_memory(free)
    assert peak_bytes(free, frugal) == pytest.approx(fewest)
    limit = float(np.ceil(fewest + share * max(0.0, most - fewest)))
    tight = replace(free, limit_bytes=limit)
    best = ExhaustiveSolver().solve(tight)
    for answer in (solve(tight), HighsSolver().solve(tight)):
        assert answer.status is Status.OPTIMAL
        assert peak_bytes(tight, answer.choice) <= limit * (1 + 1e-9)
        assert answer.objective == pytest.approx(best.objective, rel=1e-9, abs=1e-18)
    if fewest >= 2:
        assert solve(replace(free, limit_bytes=fewest * 0.99 - 1)).status is Status.INFEASIBLE


@pytest.mark.slow
def test_graphs_are_many_and_different():
    """At least 300 graphs, some of ten operators, with all that a small program has."""
    graphs = [drawn(mesh, number)[0].graph for mesh, number in CASES[::8]]
    assert len(CASES) >= 300
    sizes = Counter(count(g) for g in graphs)
    assert len(sizes) >= 5
    found = set().union(*(primitives(g) for g in graphs))
    assert {"dot_general", "mul", "reduce_sum", "broadcast_in_dim", "transpose", "reshape", "scan"} <= found
    assert any(o.updates is not None for g in graphs for o in g.outputs)


@pytest.mark.parametrize("number", range(24))
def test_larger_graphs_mean_the_same(number):
    """Up to ten operators on two axes: too many combinations to try, but the second statement has no limit."""
    rng = np.random.default_rng((7, number))
    cluster = toy(4, bandwidth=float(rng.choice([1e8, 1e9, 1e10])), latency_s=1e-8)
    (mesh,) = cluster.logical_meshes((2, 2))
    problem = Problem(random_graph(rng), cluster, CostModel(cluster), job=Job())
    ours = solve(unlimited(build(problem, mesh).problem))
    meant = least_seconds(problem.graph, mesh, problem.cost_model)
    assert ours.objective == pytest.approx(meant, rel=1e-9, abs=1e-18)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 4)])
def test_many_larger_graphs_mean_the_same(mesh_shape):
    cluster = toy(int(np.prod(mesh_shape)), latency_s=1e-8)
    (mesh,) = cluster.logical_meshes(mesh_shape)
    with_edges = 0
    for number in range(200):
        problem = Problem(random_graph(np.random.default_rng((8, number)), 14), cluster, CostModel(cluster), job=Job())
        stated = build(problem, mesh)
        ours = solve(unlimited(stated.problem))
        meant = least_seconds(problem.graph, mesh, problem.cost_model)
        if any(s.exchanges for site in stated.sites for s in site.strategies):  # the second statement has no edges
            with_edges += 1
            assert ours.objective <= 1.05 * meant, number
        else:
            assert ours.objective == pytest.approx(meant, rel=1e-9, abs=1e-18), number
    assert with_edges <= 40


@pytest.mark.slow
def test_following_loses_little():
    """Operators that follow an operand have no choice of their own; what a choice would have gained is bounded."""
    losses = []
    for mesh, number in CASES[::10]:
        problem, sharding_problem = drawn(mesh, number)
        meant = least_seconds(problem.graph, sharding_problem.mesh, problem.cost_model)
        free = least_seconds(problem.graph, sharding_problem.mesh, problem.cost_model, follow=False)
        assert free <= meant * (1 + 1e-9)
        losses.append(meant / free if free else 1.0)
    assert max(losses) < 1.5
    assert sum(loss > 1.001 for loss in losses) <= len(losses) / 5


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_the_oracle_by_an_oracle(seed, choices):
    """`least` minimizes as trying every combination does."""
    rng = np.random.default_rng(seed)
    names = [f"c{i}" for i in range(choices)]
    sizes = dict(zip(names, rng.integers(1, 4, choices), strict=True))
    terms = [((n,), rng.random(sizes[n])) for n in names]
    for _ in range(int(rng.integers(0, 8))):
        pair = tuple(rng.choice(names, 2, replace=False)) if choices > 1 else (names[0],)
        terms.append((pair, rng.random([sizes[n] for n in pair])))
    assert least(terms) == pytest.approx(least_by_trying(terms), rel=1e-12)
