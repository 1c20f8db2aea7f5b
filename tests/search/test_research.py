"""Strategies that search by trying: what they score is the problem's cost, and the seed decides what they find."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.search import strategy_named
from autopar.search.research import MethodRun, Space, Walk
from autopar.search.research.methods import climb, draw, evolve, operator_order, walk
from autopar.search.research.methods import search as beam_search
from autopar.search.research.slicings import LayerProfile, slowest_least
from autopar.solver import (
    ChoiceProblem,
    Edge,
    ExhaustiveSolver,
    Node,
    SolverError,
    Usage,
    fits,
    is_feasible,
    least_memory,
    objective,
    peak_bytes,
)
from examples import mlp
from tests.search.problems import problem_of, toy

METHODS = {"beam": beam_search, "evolutionary": evolve, "mcmc": walk, "random": draw, "reinforce": climb}


def random_problem(seed, nodes=6, limited=True):
    """A problem with pairs that exclude each other, whose limit excludes some choices and not all."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=nodes)
    made = tuple(Node(f"n{i}", rng.random(k)) for i, k in enumerate(sizes))
    edges = []
    for a, b in itertools.combinations(range(nodes), 2):
        if rng.random() < 0.5:
            costs = rng.random((sizes[a], sizes[b]))
            costs[1:, 1:][rng.random(costs[1:, 1:].shape) < 0.2] = math.inf
            edges.append(Edge(a, b, costs) if rng.random() < 0.5 else Edge(b, a, costs.T))
    usages = tuple(
        Usage(v, int(s), int(s + d), rng.integers(0, 100, size=sizes[v]).astype(float))
        for v, s, d in zip(
            rng.integers(nodes, size=2 * nodes), rng.integers(9, size=12), rng.integers(5, size=12), strict=True
        )
    )
    free = ChoiceProblem(made, tuple(edges), usages, math.inf)
    return ChoiceProblem(made, tuple(edges), usages, 1.3 * least_memory(free)[0] if limited else None)


def new_run(problem, seed=0, steps=2000):
    told = []
    start = least_memory(problem)[1]
    run = MethodRun(Space(problem), steps, start, np.random.default_rng(seed), lambda *a: told.append(a))
    return run, told


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_scores_are_the_problems_own(seed, limited):
    problem = random_problem(seed, limited=limited)
    space = Space(problem)
    choices = np.random.default_rng(seed).integers(space.sizes, size=(8, space.sizes.size))
    for choice, score in zip(choices, space.scores(choices), strict=True):
        if is_feasible(problem, choice):
            assert score == pytest.approx(objective(problem, choice))
            assert score < space.penalty
        else:
            assert score >= space.penalty
    if limited:
        assert space.peaks(choices) == pytest.approx([peak_bytes(problem, c) for c in choices])


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_deltas_are_differences_of_scores(seed):
    problem = random_problem(seed)
    space = Space(problem)
    here = Walk(space, least_memory(problem)[1])
    rng = np.random.default_rng(seed)
    for _ in range(20):
        v = int(rng.integers(space.sizes.size))
        k = int(rng.integers(space.sizes[v]))
        after = [*here.choice[:v], k, *here.choice[v + 1 :]]
        assert here.fits(v, k) == fits(problem, after)
        if here.fits(v, k):
            here.move(v, k, float(here.deltas(v)[k]))
            assert here.choice == after
            assert here.score == pytest.approx(float(space.scores(np.array([after]))[0]))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_small_problems_are_solved(name):
    """2,000 choices find the optimum of at most 4^6 in most problems, and never anything that is not allowed."""
    optimal = 0
    for seed in range(12):
        problem = random_problem(seed)
        run, told = new_run(problem)
        METHODS[name](run)
        assert run.spent <= run.steps
        best = ExhaustiveSolver().solve(problem).objective
        if run.best:
            assert is_feasible(problem, run.best)
            assert run.cost == pytest.approx(objective(problem, run.best))
            assert run.cost >= best * (1 - 1e-9)
            optimal += run.cost <= best * (1 + 1e-9)
        costs = [cost for _, cost, _ in told]
        assert costs == sorted(costs, reverse=True)
    assert optimal >= 9


def test_a_wide_beam_is_exact():
    for seed in range(6):
        problem = random_problem(seed)
        run, _ = new_run(problem, steps=10**6)
        beam_search(run)
        assert run.cost == pytest.approx(ExhaustiveSolver().solve(problem).objective)


def test_inputs_come_right_before_their_first_reader():
    nodes = tuple(Node(f"n{i}", np.zeros(2)) for i in range(5))
    pairs = [(0, 3), (1, 4), (2, 3), (3, 4)]
    space = Space(ChoiceProblem(nodes, tuple(Edge(a, b, np.ones((2, 2))) for a, b in pairs)))
    assert operator_order(space) == [0, 2, 3, 1, 4]


def tiny_problem(**options):
    fn, args = mlp.build(abstract=True, layers=1)
    return problem_of(fn, args, toy(4), mesh_shape=(4,), **options)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_seed_decides(name):
    plans = [strategy_named(name)(tiny_problem(seed=s, steps=300)) for s in (1, 1, 2, 3)]
    assert plans[0].to_json() == plans[1].to_json()
    assert name == "beam" or len({p.to_json() for p in plans}) > 1
    assert not any("runs may differ" in n for p in plans for n in p.notes)


def test_the_clock_is_a_cap_that_is_told():
    plan = strategy_named("mcmc")(tiny_problem(time_limit_s=0.0, steps=10**9))
    assert any("the time limit came after" in n for n in plan.notes)


def test_progress_falls_to_the_answer():
    seen = []
    plan = strategy_named("mcmc")(tiny_problem(steps=2000, progress=seen.append))
    costs = [p.objective_s for p in seen]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == len(costs)
    assert costs[-1] == pytest.approx(plan.search.objective)
    assert {p.strategy for p in seen} == {"mcmc"}
    assert [p.steps for p in seen] == sorted(p.steps for p in seen)


def test_exhaustive_finds_what_the_integer_program_finds():
    problem = tiny_problem()
    plan = strategy_named("exhaustive")(problem)
    assert plan.search.objective == pytest.approx(strategy_named("alpa")(problem).search.objective, rel=1e-9)
    assert plan.search.gap == 0


def test_exhaustive_refuses_with_the_size():
    fn, args = mlp.build(abstract=True, layers=3)
    with pytest.raises(SolverError, match=r"takes 1,000 choices; this problem has 10\^\d+ of \d+ nodes"):
        strategy_named("exhaustive")(problem_of(fn, args, toy(8), steps=1000))


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_recurrence_of_pipedream(seed):
    rng = np.random.default_rng(seed)
    n, devices, sizes = 5, 4, (1, 2, 4)
    profile = LayerProfile(rng.random(n), np.append(rng.random(n - 1), 0.0), rng.random(n), 2.0)

    def stage_s(i, j, k):
        send = 2 * profile.sent_bytes[i - 1] / profile.bandwidth if i else 0.0
        sync = 2 * (k - 1) * profile.parameter_bytes[i:j].sum() / profile.bandwidth
        return max(send, max(profile.seconds[i:j].sum(), sync) / k)

    def all_cuts(i, left):
        if i == n:
            if left == 0:
                yield ()
            return
        for j in range(i + 1, n + 1):
            for k in sizes:
                if k <= left:
                    for rest in all_cuts(j, left - k):
                        yield ((i, j, k), *rest)

    for asked in (None, 2, 3):
        tried = [
            max(stage_s(*s) for s in c) for c in all_cuts(0, devices) if len(c) == asked or (not asked and len(c) > 1)
        ]
        slowest, stages = slowest_least(profile, sizes, devices, asked)
        assert slowest == pytest.approx(min(tried))
        assert slowest == pytest.approx(max(stage_s(s.first, s.last + 1, sizes[s.kind]) for s in stages))
        assert sum(sizes[s.kind] for s in stages) == devices
        assert [s.first for s in stages] == [0, *(s.last + 1 for s in stages[:-1])]
        assert stages[-1].last == n - 1


@pytest.mark.parametrize(("name", "schedule"), [("gpipe", "gpipe"), ("pipedream", "1f1b")])
def test_strategies_that_cut_stages(name, schedule):
    fn, args = mlp.build(abstract=True)
    plan = autopar.parallelize(fn, cluster=toy(8), search=name, num_stages=2, num_microbatches=4).plan(*args)
    assert (plan.search.strategy, plan.num_stages, plan.num_microbatches) == (name, 2, 4)
    assert plan.schedule == schedule
    assert sorted(d for s in plan.stages for d in s.devices) == list(range(8))
    assert autopar.simulate(plan).step_time == pytest.approx(plan.step_time)
    free = autopar.parallelize(fn, cluster=toy(8), search=name).plan(*args)
    assert free.num_stages > 1


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_stages_without_a_source(name):
    with pytest.raises(InfeasiblePlanError, match="cannot make 2 stages"):
        strategy_named(name)(tiny_problem(num_stages=2))
    plan = strategy_named(name)(tiny_problem())
    assert plan.num_stages == 1
    assert any("nothing was there to cut" in n for n in plan.notes)
