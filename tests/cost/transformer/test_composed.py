"""Prices of published runs are those of the plans that the planner composes of their stages."""

from __future__ import annotations

import pytest

from benchmarks.published.composed import GRID, TOLERANCE

#: Those that each add something; the others when there is time.
_QUICK = ("recomputed", "tp", "dp", "pp", "pp, interleaved")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in _QUICK else pytest.mark.slow) for c in GRID]
)
def test_a_composed_plan_costs_what_the_run_is_priced_at(case):
    plan = case.planned()
    assert plan.num_stages == case.plan.pp * case.plan.chunks
    assert plan.num_microbatches == case.plan.num_microbatches
    assert case.priced().step_s == pytest.approx(plan.step_time, rel=TOLERANCE)
