"""Seconds of planning by phase: those of attempts that lost are among them."""

from __future__ import annotations

import time
from itertools import count

import pytest

import autopar
from autopar.search.clock import Clock
from autopar.search.planner import OTHER_ATTEMPTS
from examples import mlp
from tests.search.problems import toy


def test_what_no_phase_has_is_the_rest():
    clock = Clock({"all": 10.0})
    assert clock.rest("all", [("a", 3.0), ("b", 1.5)]) == (("a", 3.0), ("b", 1.5), ("all", 5.5))
    assert clock.rest("all", [("a", 7.0), ("b", 6.0)]) == (("a", 7.0), ("b", 6.0)), "they ran at once"


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
