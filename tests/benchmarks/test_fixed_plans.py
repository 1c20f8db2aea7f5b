"""The fixed set of plans says what a change of the planner changes."""

from __future__ import annotations

import msgspec
import pytest

from autopar import Plan
from benchmarks.fixed_plans import CASES, differences, digest


def test_thirty_problems_have_names_of_their_own():
    assert len({c.name for c in CASES}) == len(CASES) == 30


@pytest.mark.slow
def test_a_plan_that_differs_is_named_with_what_differs():
    plan = CASES[0].plan()
    kept = {CASES[0].name: digest(plan)}
    assert differences(kept, {CASES[0].name: digest(CASES[0].plan())}) == []
    search = msgspec.structs.replace(plan.content.search, lower_bound=0.0)
    (line,) = differences(kept, {CASES[0].name: digest(Plan(msgspec.structs.replace(plan.content, search=search)))})
    assert line.startswith(f"{CASES[0].name}: content ")
    assert "without_search" not in line
    (line,) = differences(kept, {CASES[0].name: digest(Plan(msgspec.structs.replace(plan.content, step_time=1.0)))})
    assert "without_search" in line
    assert "step_time_s" in line
