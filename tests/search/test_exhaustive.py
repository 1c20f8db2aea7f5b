"""An exhaustive search is never slower than the default, and the default is near it, on drawn small problems."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import autopar
from autopar import ParallelFunction
from autopar.api.options import ParallelOptions
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.search import Problem
from autopar.search.anytime import Incumbent, SearchEndedError
from autopar.search.pipeline.isomorphic_stages import StagePlanner
from autopar.search.policy import EFFORTS, EffortPolicy, SearchPolicy, with_effort, without_estimates
from autopar.search.store import Store
from autopar.solver.meter import Work
from examples import mlp
from tests.search.problems import problem_of, toy

#: Times the step of the exhaustive search that the default may take.
NEAR = 1.05


def both(cluster: Cluster, **sizes: int) -> tuple[float, float]:
    """Seconds of a step by default and by exhaustive search."""
    fn, args = mlp.build(abstract=True, **sizes)
    default, whole = (
        autopar.parallelize(fn, cluster=cluster, donate_argnums=0, time_limit_s=limit_s).plan(*args)
        for limit_s in (None, math.inf)
    )
    assert whole.search.lower_bound <= whole.step_time
    return default.step_time, whole.step_time


def test_an_exhaustive_search_is_never_slower():
    default_s, whole_s = both(toy(2), layers=2, hidden=64, batch=8)
    assert whole_s <= default_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_default_is_near_an_exhaustive_search(seed: int):
    random = np.random.default_rng((20261, seed))
    cluster = toy(int(random.choice([2, 4])))
    sizes = {"layers": int(random.integers(3, 6)), "hidden": int(random.choice([32, 64, 128])), "batch": 16}
    default_s, whole_s = both(cluster, **sizes)
    assert whole_s <= default_s * (1 + 1e-9)
    assert default_s <= NEAR * whole_s


def test_only_thresholds_of_effort_differ():
    policy = without_estimates(SearchPolicy())
    assert policy.sizes.large_nodes == SearchPolicy().sizes.large_nodes
    assert policy.enumeration.most_slicings > SearchPolicy().enumeration.most_slicings


def test_an_effort_is_one_of_four_words():
    with pytest.raises(AutoparError, match="not a search effort"):
        ParallelOptions(effort="3")
    told = CliRunner().invoke(main, ["plan", "x.py:f", "--effort", "3"])
    assert told.exit_code == 2 and all(repr(word) in told.output for word in EFFORTS)


def test_more_effort_searches_longer_and_is_never_slower():
    fn, args = mlp.build(abstract=True, layers=4)
    plans = [autopar.parallelize(fn, cluster=toy(2, nodes=2), effort=word).plan(*args) for word in EFFORTS[:3]]
    works, seconds = ([getattr(p.search, name) for p in plans] for name in ("work", "step_time"))
    assert works == sorted(works) and seconds == sorted(seconds, reverse=True)
    gaps = [with_effort(SearchPolicy(), word).effort for word in EFFORTS]
    assert [g.gap for g in gaps] == sorted((g.gap for g in gaps), reverse=True) and gaps[-1].budget is None


def test_a_spent_budget_ends_with_the_best_plan_and_its_bound():
    """The same plan on every machine, as no clock decides."""
    fn, args = mlp.build(abstract=True, layers=4)
    policy = replace(SearchPolicy(), effort=EffortPolicy(gap=0.0, large_gap=0.0, budget=1))
    options = autopar.parallelize(fn, cluster=toy(4), donate_argnums=0).options
    first, again = (ParallelFunction(fn, replace(options, policy=policy)).plan(*args) for _ in range(2))
    (note,) = (n for n in first.notes if "budget of 1 work units" in n)
    assert "may save" in note or "may find better" in note
    assert first.to_json() == again.to_json()
    whole = ParallelFunction(fn, replace(options, policy=replace(policy, effort=EffortPolicy(gap=0.0, budget=None))))
    assert whole.plan(*args).search.work > first.search.work


def test_a_spent_budget_ends_before_the_next_stage_is_planned():
    fn, args = mlp.build(abstract=True, layers=1)
    plan = autopar.parallelize(fn, cluster=toy(1)).plan(*args)
    problem = problem_of(fn, args, toy(1))
    problem.meter.add(Work.PARTS, 1)
    planned: list[Problem] = []

    def intra(stage: Problem) -> Plan:
        planned.append(stage)
        return plan

    incumbent = Incumbent(budget=1)
    watched = replace(problem, anytime=incumbent)
    assert StagePlanner(intra).plan(watched, "stage 1") == plan.content and planned  # the first plan is waited for
    incumbent.offer(plan)
    with pytest.raises(SearchEndedError, match="budget of 1 work units"):
        StagePlanner(intra).plan(replace(watched, store=Store()), "stage 2")
    assert len(planned) == 1


def test_the_command_line_knows_it():
    assert "--exhaustive" in CliRunner().invoke(main, ["plan", "--help"]).output
