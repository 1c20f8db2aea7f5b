"""Branches side by side are found by the search, priced as everything else, and the best of all ways is taken."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

import autopar
from autopar import AutoparError, InfeasiblePlanError
from autopar.search.pipeline import trials
from autopar.search.policy import SearchPolicy
from tests.end_to_end.towers import Towers, drawn
from tests.search.problems import f32, toy, with_policy

POLICY = SearchPolicy()
SKEWED, TRUNK = Towers((8, 2), width=128, batch=256), Towers((2, 4), width=256, batch=64, trunk=4)
EVERY = replace(POLICY, branches=replace(POLICY.branches, most_candidates=10**9))


def planned(towers, cluster, policy=POLICY, **options):
    fn, args = towers.build(jnp.float32)
    return with_policy(autopar.parallelize(fn, cluster=cluster, **options), policy).plan(*args)


def seconds(*args, **options):
    try:
        return planned(*args, **options).step_time
    except AutoparError:
        return math.inf


@pytest.fixture
def planned_counts(monkeypatch):
    """Numbers of microbatches of the branches that were planned, one by one."""
    counts, plan_candidate = list[int](), trials.plan_candidate

    def recorded(step, candidate, *args):
        if candidate.schedule is not None and candidate.schedule.name == "branches":
            counts.append(candidate.count)
        return plan_candidate(step, candidate, *args)

    monkeypatch.setattr(trials, "plan_candidate", recorded)
    return counts


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_towers_on_two_devices_take_half_of_one_after_the_other(microbatches):
    towers = Towers((4, 4), width=256, batch=64)
    one = planned(towers, toy(1), num_microbatches=microbatches)
    two = planned(towers, toy(2), schedule="branches", num_microbatches=microbatches)
    assert two.step_time <= 0.55 * one.step_time
    assert autopar.simulate(two).step_time == pytest.approx(two.step_time)


def test_the_search_finds_towers_of_large_matrices_and_few_examples():
    """Links are slow next to what a batch of four computes: one stage sends more than a branch does."""
    towers = Towers((3, 3), width=256, batch=4)
    cluster = toy(2, bandwidth=1e8, latency_s=1e-5)
    free = planned(towers, cluster)
    assert free.schedule == "branches"
    assert "branches side by side: state[0]['tower0'] on device" in str(free)
    assert free.step_time < planned(towers, cluster, num_stages=1).step_time


def test_branches_whose_sends_take_longer_than_the_plan_at_hand_are_not_planned(planned_counts):
    """What two towers of many examples send over a slow link takes longer than one stage."""
    towers, cluster = replace(TRUNK, width=128, batch=1024), toy(2, bandwidth=1e8, latency_s=1e-5)
    free = planned(towers, cluster)
    rows = [row for row in free.search.trail if row.form == "branches"]
    assert not planned_counts and [row.outcome for row in rows] == ["bounded"]
    asked = planned(towers, cluster, schedule="branches")
    assert planned_counts and free.step_time <= rows[0].least_s <= 1.01 * asked.step_time


@pytest.mark.few(4)
@pytest.mark.parametrize("number", range(8))
def test_estimates_of_branches_are_below_their_plans(monkeypatch, number):
    """Stages share their work without a loss, so that plans take longer."""
    below, plan_candidate = [], trials.plan_candidate

    def recorded(step, candidate, *args):
        plan = plan_candidate(step, candidate, *args)
        if isinstance(plan, autopar.Plan):
            below.append(candidate.estimate_s <= 1.01 * plan.step_time)
        return plan

    monkeypatch.setattr(trials, "plan_candidate", recorded)
    towers = replace(drawn(number), width=64, batch=8)
    planned(towers, toy(2, latency_s=1e-5, bandwidth=(1e8, 1e9, 1e10)[number % 3]), schedule="branches")
    assert below and all(below)


@pytest.mark.few(1)
@pytest.mark.parametrize(("towers", "counts"), [(SKEWED, [1]), (TRUNK, [1, 2, 4, 8])])
def test_more_microbatches_are_planned_where_workers_that_join_branches_may_gain(planned_counts, towers, counts):
    """They let branches run while others are joined: where the busiest worker is busy all the time nothing is gained.

    Of each number but the first the placements of one cut are planned.
    """
    planned(towers, toy(2), schedule="branches")
    assert sorted(set(planned_counts)) == counts
    assert all(planned_counts.count(count) <= 4 for count in counts[1:])


@pytest.mark.slow
def test_devices_are_shared_by_the_work_of_branches():
    plan = planned(Towers((8, 2, 2), width=128, batch=32), toy(4), schedule="branches", num_microbatches=1)
    tower = next(i.stage for i in plan.content.inputs if "tower0" in i.path)
    assert len(plan.stages[tower].devices) == 2
    assert len({s.devices for s in plan.stages}) == 3


def test_a_memory_limit_holds():
    towers, cluster = Towers((3, 2), width=64, batch=64, momentum=True), toy(4)
    free = planned(towers, cluster, schedule="branches", num_microbatches=1)
    limit = int(0.8 * free.peak_memory)
    plan = planned(towers, cluster, schedule="branches", memory_limit=limit)
    assert plan.peak_memory <= limit
    with pytest.raises(InfeasiblePlanError):
        planned(towers, cluster, schedule="branches", memory_limit=free.peak_memory // 50)


def test_a_step_of_forwards_alone():
    def fn(a, b, x):
        for w in a:
            x = jnp.tanh(x @ w)
        y = x
        for w in b:
            y = jnp.tanh(x * 0 + y @ w)
        return x.sum()

    def towers(a, b, x, y):
        for w, v in zip(a, b, strict=True):
            x, y = jnp.tanh(x @ w), jnp.tanh(y @ v)
        return x @ y.T

    w, x = [f32(64, 64)] * 3, f32(16, 64)
    plan = autopar.parallelize(towers, cluster=toy(2), schedule="branches", batch_argnums=(2, 3)).plan(w, w, x, x)
    assert plan.num_stages == 3
    assert not any(t.kind == "backward" for t in plan.content.pipeline.works)
    with pytest.raises(InfeasiblePlanError, match="no independent branches"):
        autopar.parallelize(fn, cluster=toy(2), schedule="branches", batch_argnums=2).plan(w, w, x)


def chosen_and_best(number):
    """Seconds of the free plan, those of the branches that are chosen, of all ways, and of what else there is."""
    towers = replace(drawn(number), width=64, batch=8)
    devices = (2, 4)[number % 2]
    cluster = toy(devices, latency_s=1e-5, bandwidth=(1e8, 1e9, 1e10)[number % 3])
    others = [seconds(towers, cluster, num_stages=s) for s in (1, 2, 4) if s <= devices]
    return (
        seconds(towers, cluster),
        seconds(towers, cluster, schedule="branches"),
        min(seconds(towers, cluster, EVERY, schedule="branches", num_microbatches=n) for n in (1, 2, 4, 8)),
        min(others),
    )


def compare(number):
    free, chosen, best, others = chosen_and_best(number)
    assert chosen <= 1.01 * best
    assert free <= 1.01 * min(best, others)


@pytest.mark.parametrize("number", [2, 10])
def test_the_best_of_all_ways(number):
    compare(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_the_best_of_all_ways_of_drawn_steps(number):
    compare(number)
