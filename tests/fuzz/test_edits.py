"""Saved plans that were changed: what they compute is right, or they are refused with the entry that is wrong."""

from __future__ import annotations

import json
import re
from functools import cache

import jax
import msgspec
import pytest

import autopar
from autopar import Plan
from autopar.errors import PlanMismatchError
from autopar.plan import PlanContent
from tests.fuzz.edits import CASES, Edits

#: Cases whose edits run in the default suite, and how many.
FEW = {"three axes": 25, "zero and tensor": 10, "pipeline": 10}


@cache
def edits_of(name: str) -> Edits:
    return Edits(name)


@pytest.mark.parametrize("name", FEW)
def test_an_edited_plan_computes_the_same_or_is_refused(name: str) -> None:
    edits = edits_of(name)
    outcomes = [(what, edits.outcome(text)) for what, text in map(edits.drawn, range(FEW[name]))]
    assert [o for o in outcomes if not o[1].startswith(("equal", "typed"))] == []
    assert sum(o[1].startswith("typed") for o in outcomes) >= FEW[name] // 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_edits(name: str) -> None:
    edits = edits_of(name)
    outcomes = [(what, edits.outcome(text)) for what, text in map(edits.drawn, range(100))]
    assert [o for o in outcomes if not o[1].startswith(("equal", "typed"))] == []


@pytest.mark.parametrize("name", FEW)
def test_a_plan_without_its_digest_is_proven_and_runs(name: str) -> None:
    """As plans of older versions, which have none."""
    edits = edits_of(name)
    text = re.sub(r'\s*"digest": "\w+",', "", edits.text)
    assert text != edits.text and Plan.from_json(text).unproven
    assert edits.outcome(text) == "equal"


def changed(edits: Edits, **fields: object) -> str:
    """The text of the plan with other content, and so without a digest."""
    content: PlanContent = msgspec.structs.replace(edits.plan.content, **fields)
    return Plan(content, unproven=True).to_json()


def test_the_first_wrong_entry_is_named() -> None:
    edits = edits_of("three axes")
    content = edits.plan.content
    at, product = next((n, r) for n, r in enumerate(content.operators) if "sum(" in "".join(r.results))
    whole = msgspec.structs.replace(product, results=(product.results[0].partition("+sum")[0],))
    operators = (*content.operators[:at], whole, *content.operators[at + 1 :])
    outcome = edits.outcome(changed(edits, operators=operators))
    assert outcome.startswith(
        f"typed PlanMismatchError: the plan is wrong at plan.operators[{at}]: no sharding rule of"
    )
    half = msgspec.structs.replace(content.outputs[0], layout=content.outputs[0].layout + "+sum(z)")
    assert "z" in content.outputs[0].layout
    outcome = edits.outcome(changed(edits, outputs=(half, *content.outputs[1:])))
    assert "the plan is wrong at plan.outputs[0].layout" in outcome and "names an axis twice" in outcome
    outcome = edits.outcome(changed(edits, donated=(content.inputs[0].path,)))
    assert outcome.startswith("typed PlanMismatchError: the plan is wrong at plan.donated[0]")


def test_stages_are_proven_each_by_itself() -> None:
    edits = edits_of("pipeline")
    part = edits.plan.content.parts[1]
    record = part.operators[3]
    other = msgspec.structs.replace(part, operators=(*part.operators[:3], *part.operators[4:]))
    outcome = edits.outcome(changed(edits, parts=(edits.plan.content.parts[0], other)))
    assert f"wrong at plan.parts[1].operators: nothing says how {record.id} is split" in outcome
    fewer = msgspec.structs.replace(part, fingerprint="0" * 64)
    outcome = edits.outcome(changed(edits, parts=(edits.plan.content.parts[0], fewer)))
    assert "wrong at plan.parts[1].fingerprint" in outcome


def test_arguments_of_a_pipeline_are_proven_too() -> None:
    edits = edits_of("pipeline")
    content = edits.plan.content
    swapped = (content.inputs[1], content.inputs[0], *content.inputs[2:])
    assert "wrong at plan.inputs[0].path" in edits.outcome(changed(edits, inputs=swapped))
    part = content.parts[0]
    at, loop = next((n, r) for n, r in enumerate(part.operators) if r.id.rpartition("/")[2] == "scan.0")
    partial = msgspec.structs.replace(loop, operands=("[.,.]+sum(x)", *loop.operands[1:]))
    other = msgspec.structs.replace(part, operators=(*part.operators[:at], partial, *part.operators[at + 1 :]))
    outcome = edits.outcome(changed(edits, parts=(other, *content.parts[1:])))
    assert outcome.startswith("typed PlanMismatchError: the plan is wrong at plan.parts[0].operators"), outcome


def test_an_edit_that_is_right_runs_and_has_no_digest_until_it_is_planned_again() -> None:
    """Where an argument lies is a matter of taste: it is gathered, or split, before it is read."""
    edits = edits_of("three axes")
    content = edits.plan.content
    moved = tuple(
        msgspec.structs.replace(i, layout=re.sub(r"[xyz+]+", ".", i.layout)) if i.role == "batch" else i
        for i in content.inputs
    )
    assert moved != content.inputs
    text = changed(edits, inputs=moved)
    assert "digest" not in json.loads(text)
    assert edits.outcome(text) == "equal"
    loaded = Plan.from_json(text)
    assert loaded.unproven and "digest" not in json.loads(loaded.to_json())
    assert not Plan.from_json(edits.text).unproven


def test_other_errors_of_an_unproven_plan_are_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = edits_of("three axes")

    def fails(*_: object) -> None:
        raise KeyError("dot_general.7")

    monkeypatch.setattr("autopar.api.pure.lower", fails)
    for text, error in ((edits.text, KeyError), (changed(edits), PlanMismatchError)):
        with jax.enable_x64(True), pytest.raises(error, match=r"dot_general\.7"):
            autopar.parallelize(edits.step, plan=Plan.from_json(text)).compile(*edits.fresh())
