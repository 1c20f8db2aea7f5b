"""Seconds of planning by phase: those of attempts that lost are among them."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

import pytest

import autopar
from autopar.search.clock import Clock
from autopar.search.planner import OTHER_ATTEMPTS
from benchmarks.drawn import first_near_s
from examples import mlp
from tests.search.problems import toy


def test_what_no_phase_has_is_the_rest():
    clock = Clock({"all": 10.0})
    assert clock.rest("all", [("a", 3.0), ("b", 1.5)]) == (("a", 3.0), ("b", 1.5), ("all", 5.5))
    assert clock.rest("all", [("a", 7.0), ("b", 6.0)]) == (("a", 7.0), ("b", 6.0)), "they ran at once"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 2}])
def test_attempts_that_lost_are_among_the_phases(options, monkeypatch):
    """By a clock that goes on at each look, phases add up to what the whole search took, and not to more."""
    fn, args = mlp.build(abstract=True)
    parallel = autopar.parallelize(fn, cluster=toy(4, nodes=2), **options)
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    plan = parallel.plan(*args)
    took, phases = next(ticks), dict(plan.phases)
    assert 0.8 * took <= sum(phases.values()) <= took
    assert phases[OTHER_ATTEMPTS] > 0
    assert OTHER_ATTEMPTS in str(plan).partition("planned in")[2]


def test_plans_that_were_the_best_known_have_their_seconds():
    """They get faster, the last is the plan, and none is known before the step was traced or after the search."""
    fn, args = mlp.build(abstract=True, layers=8, hidden=512, batch=64)
    plan = autopar.parallelize(fn, cluster=toy(2, nodes=2, bandwidth=1e7), donate_argnums=0).plan(*args)
    at_s, step_s = zip(*plan.search.incumbents, strict=True)
    assert list(at_s) == sorted(at_s) and list(step_s) == sorted(step_s, reverse=True)
    assert step_s[-1] == plan.step_time and len(step_s) > 1
    assert dict(plan.phases)["trace"] < at_s[0] < at_s[-1] < plan.search.seconds
    assert autopar.Plan.from_json(plan.to_json()).search.incumbents == ()


def test_near_is_the_first_incumbent_within_a_hundredth():
    fn, args = mlp.build(abstract=True)
    plan = autopar.parallelize(fn, cluster=toy(2)).plan(*args)
    step_s = plan.step_time
    incumbents = ((1.0, 1.02 * step_s), (3.0, 1.005 * step_s), (8.0, step_s))
    plan = replace(plan, phases=(("all", 9.0),), incumbents=incumbents)
    assert first_near_s(plan, 10.0) == 4.0, "a second passed before planning began"
    assert first_near_s(replace(plan, incumbents=()), 10.0) == 10.0
