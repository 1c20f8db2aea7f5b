"""The stages that hold an argument, and how much each holds, wherever a plan tells of it."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import PlanMismatchError
from autopar.plan import InputPart, InputRecord, Plan
from autopar.plan.arguments import input_groups
from autopar.plan.text import held_bytes, inputs_header
from autopar.plan.types import dtype_and_shape
from autopar.report.diff import diff
from autopar.report.layers import layers
from autopar.report.page import plan_page
from tests.search.problems import f32, momentum, toy

LAYERS = 6


def stacked(weights, tokens):
    """A loop over layers between a table and its transpose, which the first and the last stage hold."""

    def layer(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"], None

    x = jax.lax.scan(layer, tokens @ weights["table"], weights["layers"])[0]
    return ((x @ weights["table"].T) ** 2).mean()


@pytest.fixture(scope="module", params=[(2, 4), (3, 6)], ids=["2 stages", "3 stages"])
def plan(request):
    num_stages, devices = request.param
    weights = {"table": f32(64, 32), "layers": {"up": f32(LAYERS, 32, 128), "down": f32(LAYERS, 128, 32)}}
    step, args = momentum(stacked, weights, f32(32, 64))
    return autopar.parallelize(step, cluster=toy(devices), num_stages=num_stages, num_microbatches=4).plan(*args)


def test_parts_of_a_stack_are_its_slices_and_every_stage_has_its_own(plan):
    stacks = [i for i in plan.content.inputs if "layers" in i.path]
    assert len(stacks) == 4
    for i in stacks:
        slices = [n for p in i.parts for n in range(*p.slices)]
        assert slices == list(range(LAYERS))
        for p in i.parts:
            first, end, total = plan.stages[p.stage].layers
            assert first <= p.slices[0] < p.slices[1] <= end and total == LAYERS
        assert plan.input_stages[i.path] == tuple(range(plan.num_stages))


def test_the_bytes_of_parts_are_the_state_of_their_stages(plan):
    """So of every stage; before, all of a stack counted on stage 0."""
    for number, stage in enumerate(plan.stages):
        held = [r for i in plan.content.inputs for r in i.of_stages if r.stage == number and r.role != "batch"]
        assert sum(held_bytes(plan.content, r) for r in held) == stage.state_bytes
        assert {r.role for r in held} == {"parameter", "optimizer"}


def test_an_argument_of_several_stages_is_whole_on_each(plan):
    last = plan.num_stages - 1
    (table,) = (i for i in plan.content.inputs if i.role == "parameter" and i.path.endswith("['table']"))
    assert [(r.stage, r.type) for r in table.of_stages] == [(0, "f32[64,32]"), (last, "f32[64,32]")]
    assert InputRecord.in_parts(table.path, table.type, table.role, table.parts) == table


def test_text_and_page_tell_of_all_stages(plan):
    each = f"({LAYERS // plan.num_stages} of {LAYERS} each)"
    last = plan.num_stages - 1
    stages = "0, 1" if last == 1 else "0-2"
    for i in plan.content.inputs:
        if "layers" in i.path:
            (row,) = (line for line in str(plan).splitlines() if line.strip().startswith(i.path))
            assert row.endswith(f"{stages} {each}")
    text = re.sub("<[^>]*>", "", plan_page(plan))
    assert f"{stages} {each}" in text and f"{', '.join(map(str, (0, last)))} (all on each)" in text
    assert f"<td>{stages} {each}</td>" in plan._repr_html_()
    assert inputs_header(plan.content)[-1] == "stages"
    rows = [row for row in layers(plan.content, 100).rows if "layers" in row[0]]
    assert {n for row in rows for n in row[3].replace("-", ", ").split(", ")} >= {"0", str(last)}


def test_explain_tells_what_each_stage_holds(plan):
    path = next(i.path for i in plan.content.inputs if i.path.endswith("['up']"))
    text = plan.explain(path)
    assert re.findall(r"held by: +stage (\d)", text) == [str(n) for n in range(plan.num_stages)]
    size = LAYERS // plan.num_stages
    assert f"slices 0{'-' if size > 2 else ', '}{size - 1}" in text.replace(", 1, 2", "-2")
    assert "a device" in text


def test_the_file_has_the_parts_and_a_wrong_one_is_named(plan):
    assert Plan.from_json(plan.to_json()) == plan
    document = json.loads(plan.to_json())
    n = next(n for n, i in enumerate(plan.content.inputs) if "layers" in i.path)
    parts = document["plan"]["inputs"][n]["parts"]
    slices = [("slices", value) for value in ([LAYERS - 1, LAYERS], [0, 9], None)]
    for key, value in (("stage", 9), *slices, ("layout", "[nowhere,.,.]")):
        wrong = [dict(p) for p in parts]
        wrong[-1][key] = value
        document["plan"]["inputs"][n]["parts"] = wrong
        with pytest.raises(PlanMismatchError, match=rf"inputs\[{n}\].parts"):
            Plan.from_json(json.dumps(document))


def test_a_part_that_is_elsewhere_is_a_difference(plan):
    n, i = next((n, i) for n, i in enumerate(plan.content.inputs) if "layers" in i.path)
    first, second, *rest = i.parts
    end = second.slices[1]
    moved = InputRecord.in_parts(
        i.path, i.type, i.role,
        [InputPart(first.stage, first.layout, first.memory, (0, end - 1)),
         InputPart(second.stage, second.layout, second.memory, (end - 1, end)), *rest],
    )  # fmt: skip
    inputs = (*plan.content.inputs[:n], moved, *plan.content.inputs[n + 1 :])
    (pair,) = diff(plan, Plan(type(plan.content)(**{**as_fields(plan.content), "inputs": inputs}))).inputs
    assert pair.name == i.path and pair.before != pair.after


def as_fields(content):
    return {name: getattr(content, name) for name in content.__struct_fields__}


def test_groups_of_arguments_tell_how_many_each_stage_holds():
    records = [InputRecord(f"params[{n}]", "f32[8]", "parameter", "[.]", stage=min(n, 1)) for n in range(3)]
    (group,) = input_groups(records)
    assert group.held_by == "0 (1 of 3), 1 (2 of 3)"
    assert input_groups(records[1:])[0].held_by == "1"
    assert dtype_and_shape(records[0].type) == ("f32", (8,))
