"""The page of a plan's keys is what its generator writes, and has the keys that files have."""

from __future__ import annotations

import json

from autopar.plan import PlanContent, Stage
from docs import plan_file
from tests.plan.plans import small_plan


def test_it_is_up_to_date() -> None:
    assert plan_file.TARGET.read_text(encoding="utf-8") == plan_file.text(), "run: python -m docs.plan_file"


def test_keys_of_a_file_are_on_it() -> None:
    page = plan_file.text()
    plan = json.loads(small_plan().to_json())["plan"]
    for keys in (plan, plan["stages"][0], plan["stages"][0]["memory"], plan["search"], plan["inputs"][0]):
        assert [key for key in keys if f"| `{key}` |" not in page] == []
    assert {PlanContent, Stage} <= set(plan_file.structs(PlanContent))


def test_types_are_in_words_of_json() -> None:
    assert plan_file.type_text(tuple[tuple[str, float], ...]) == "list of (text, number)"
    assert plan_file.type_text(float | None) == "number or null"
    head, fields = plan_file.described(Stage)
    assert head.startswith("A part of the program") and "logical mesh" in fields["mesh_axes"]
