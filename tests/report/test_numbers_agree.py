"""Peak memory is one number: of the plan, in text, JSON and HTML, and the sum of its parts."""

from __future__ import annotations

import json

import pytest

import autopar
from autopar.plan.text import bytes_text
from autopar.report.page import plan_page
from examples import mlp
from tests.api.steps import CLUSTER

PLANS = [
    {},
    {"num_microbatches": 4},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "1f1b"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved"},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "zb-h1"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "chimera"},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", PLANS, ids=lambda o: str(o.get("schedule", o)))
def test_peak_memory_is_one_number(options):
    step, args = mlp.build("tiny")
    plan = autopar.parallelize(step, cluster=CLUSTER, **options).plan(*args)
    totals = [s.memory.total for s in plan.stages]
    assert max(totals) == plan.peak_memory == plan.content.peak_memory
    written = json.loads(plan.to_json())["plan"]
    assert max(sum(s["memory"].values()) for s in written["stages"]) == written["peak_memory"] == plan.peak_memory
    peak = bytes_text(plan.peak_memory)
    assert f"{peak} a device predicted" in str(plan)
    rows = [line for line in str(plan).splitlines() if line.strip().endswith(peak)]
    assert rows, "no row of the table has the peak as its total"
    assert peak in plan_page(plan)
    assert autopar.simulate(plan).peak_memory == plan.peak_memory
    if plan.num_stages > 1:
        assert any(s.memory.in_flight for s in plan.stages)
