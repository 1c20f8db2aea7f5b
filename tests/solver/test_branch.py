"""Branch and bound over memory: what fits is never dropped, small dense problems end with the proof."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver import ChoiceProblem, ExhaustiveSolver, Node, Status, Usage, is_feasible
from autopar.solver.evaluate import fits
from autopar.solver.lagrange.branch import Branching
from autopar.solver.lagrange.contract import Contracted, contract
from autopar.solver.lagrange.dual import Dual
from autopar.solver.lagrange.packed import Packed, pack
from autopar.solver.lagrange.room import keep_what_fits
from autopar.solver.lagrange.search import Search
from autopar.solver.lagrange.solver import LagrangeSolver
from tests.solver.problems import choices, dense_problem, random_problem, with_usages


def packed_of(problem: ChoiceProblem) -> tuple[Contracted, Packed] | None:
    contracted = contract(problem)
    return None if contracted is None else (contracted, pack(problem, contracted))


def knapsack(seed: int, items: int = 12) -> ChoiceProblem:
    """Chained values of two or three sizes, of which few fit whole: the dual mixes what no choice can."""
    r = np.random.default_rng(seed)
    sizes = r.integers(2, 4, items)
    nodes = tuple(Node(str(v), np.sort(r.integers(0, 1000, k))[::-1].astype(float)) for v, k in enumerate(sizes))
    usages = tuple(Usage(v, 0, 2, np.cumsum(r.integers(1, 50, k)).astype(float)) for v, k in enumerate(sizes))
    least = sum(float(use.bytes.min()) for use in usages)
    most = sum(float(use.bytes.max()) for use in usages)
    return ChoiceProblem(nodes, (), usages, math.floor(least + 0.3 * (most - least)))


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_is_never_dropped(seed: int) -> None:
    problem = random_problem(seed, 6)
    made = packed_of(problem)
    if made is None or not made[1].nodes:
        return
    contracted, packed = made
    allowed = np.ones(packed.costs.size, dtype=np.bool_)
    some = keep_what_fits(packed.memory, packed.graph.first, allowed)
    fitting = [c for c in choices(problem) if fits(problem, c)]
    for choice in fitting:
        for i, v in enumerate(packed.nodes):
            same = np.flatnonzero(contracted.strategies[v] == choice[v])
            if all(contracted.strategies[u][k] == choice[u] for k in same for u in range(len(choice))
                   if contracted.leader[u] == v):  # fmt: skip
                assert some and allowed[packed.graph.first[i] + same].all()
    assert some or not any(is_feasible(problem, c) for c in fitting)


def test_more_goes_once_others_have_to_be_there() -> None:
    # 6 of 10 are taken at least: of the first, 5 and more never fit; then the second may still take its 3.
    problem = ChoiceProblem(
        (Node("a", [3.0, 2.0, 1.0]), Node("b", [1.0, 0.0])),
        (),
        (Usage(0, 0, 1, [4.0, 5.0, 9.0]), Usage(1, 0, 1, [2.0, 6.0])),
        10.0,
    )
    made = packed_of(problem)
    assert made is not None
    allowed = np.ones(5, dtype=np.bool_)
    assert keep_what_fits(made[1].memory, made[1].graph.first, allowed)
    assert allowed.tolist() == [True, True, False, True, True]
    packed = pack(replace(problem, limit_bytes=5.0), made[0])
    assert not keep_what_fits(packed.memory, packed.graph.first, np.ones(5, dtype=np.bool_))


def branched(problem: ChoiceProblem, most_parts: int) -> tuple[Packed, Branching] | None:
    made = packed_of(problem)
    if made is None or not made[1].nodes:
        return None
    packed = made[1]
    allowed = np.ones(packed.costs.size, dtype=np.bool_)
    if not keep_what_fits(packed.memory, packed.graph.first, allowed):
        return None
    dual = Dual(replace(packed, costs=np.where(allowed, packed.costs, packed.forbidden)))
    dual.press(math.inf)
    for _ in range(50):
        dual.step()
    branching = Branching(packed, Search(packed, dual.best_prices, dual.messages, 0), dual, 0.0, 0)
    branching.run(allowed, math.inf, most_parts)
    return packed, branching


@pytest.mark.parametrize("seed", range(8))
def test_knapsacks_are_proven(seed: int) -> None:
    problem = knapsack(seed)
    wanted = ExhaustiveSolver(prune=True).solve(problem)
    made = branched(problem, 10_000)
    assert made is not None
    packed, branching = made
    assert branching.cost + packed.constant == pytest.approx(wanted.objective, abs=1e-9)
    assert branching.bound == pytest.approx(branching.cost, rel=1e-9)
    assert branching.parts < 400  # of half a million choices


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_after_any_number_of_parts(seed: int) -> None:
    problem = with_usages(dense_problem(seed), seed, 0.1 + 0.1 * (seed % 5))
    wanted = ExhaustiveSolver(prune=True).solve(problem)
    for most_parts in (0, 1, 5, 40):
        made = branched(problem, most_parts)
        if made is None:
            assert wanted.status is Status.INFEASIBLE or wanted.found
            return
        packed, branching = made
        assert branching.parts <= most_parts
        assert branching.bound + packed.constant <= wanted.objective + 1e-9
        assert branching.cost + packed.constant >= wanted.objective - 1e-9


@pytest.mark.slow
def test_dense_problems_reach_the_optimum() -> None:
    found = best = 0
    for seed in range(10):
        problem = with_usages(dense_problem(seed), seed, 0.3)
        wanted = ExhaustiveSolver(prune=True).solve(problem)
        if not wanted.found:
            continue
        answer = LagrangeSolver(steps=200, rounds=2, parts=60).solve(problem)
        best += answer.objective <= wanted.objective * (1 + 1e-9) + 1e-15
        found += 1
        assert answer.lower_bound <= wanted.objective + 1e-9 * abs(wanted.objective)
    assert found >= 5 and best == found


def test_an_ascent_out_of_time_keeps_a_choice_and_no_wrong_bound() -> None:
    made = packed_of(knapsack(1))
    assert made is not None
    late = Dual(made[1], deadline=-math.inf)
    late.press(-math.inf)
    late.step()
    assert late.bound == -math.inf and late.nearest is not None
    assert not np.isnan(late.prices).any()
