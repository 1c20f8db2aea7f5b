"""Prices of published runs are those of the plans that the planner composes of their stages."""

from __future__ import annotations

import pytest

from benchmarks.published.composed import GRID, TOLERANCE

#: Those that each add something; the others when there is time.
_QUICK = ("tp", "selective", "pp")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in _QUICK else pytest.mark.slow) for c in GRID]
)
def test_a_composed_plan_costs_what_the_run_is_priced_at(case):
    plan = case.planned()
    assert plan.num_stages == case.plan.pp * case.plan.chunks
    assert plan.num_microbatches == case.plan.num_microbatches
    assert case.priced().step_s == pytest.approx(plan.step_time, rel=TOLERANCE)


@pytest.mark.slow
def test_a_plan_with_offload_keeps_the_moments_on_the_host():
    (case,) = (c for c in GRID if c.name == "offload")
    (stage,) = case.planned().stages
    moments_bytes = stage.memory.optimizer + stage.host_bytes
    assert stage.host_bytes > 0.9 * moments_bytes
    assert stage.host_time > 0
