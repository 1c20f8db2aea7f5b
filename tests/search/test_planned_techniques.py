"""The contract of techniques on the planner's side: what is offered composes, what is not has a reason."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.api.steps import TracedStep
from autopar.cost import CostModel
from autopar.lower.techniques import FIRST
from autopar.lower.techniques import TECHNIQUES as LOWERED
from autopar.plan import StepForm
from autopar.plan.techniques import TECHNIQUES as NAMED
from autopar.search import Problem
from autopar.search.job import Job, Request
from autopar.search.techniques import TECHNIQUES, Asked
from tests.lower.test_techniques import ALONE, made
from tests.search.problems import toy

#: By technique the options that let it be tried.
ASKED: dict[str, dict[str, Any]] = {"layered_update": {"offload": "auto"}, "block_scores": {"attention": "blocks"}}


def asked(name: str, **options: Any) -> tuple[Asked, TracedStep]:
    """A model with some options on two devices."""
    found, _, _ = made(name)
    step, cluster = TracedStep(found, (), (), 2), toy(2)
    wishes = {"padding": True, **{k: v for k, v in options.items() if k in ("padding", "attention")}}
    job = Job(**{k: v for k, v in options.items() if k not in wishes and k != "attention"})
    problem = Problem(found.graph, cluster, CostModel(cluster), Request(**wishes), job)
    answers = {
        "updates_by_layer": step.may_update_by_layer,
        "updates_in_backward": lambda: step.update_in_backward()[0],
    }
    return Asked(problem, **answers), step


def test_order_and_names_are_those_of_lowering() -> None:
    applied = [t.field for t in (*FIRST, *LOWERED)]
    assert [f for f in applied if f in TECHNIQUES] == list(TECHNIQUES)
    assert {t.field for t in NAMED} - TECHNIQUES.keys() == {"microbatches", "remat", "host_update"}


@pytest.mark.few(5)
@pytest.mark.parametrize("field", list(TECHNIQUES))
@pytest.mark.parametrize("name", ["flat", "stacks", pytest.param("text", marks=pytest.mark.slow)])
def test_what_is_offered_changes_the_step(x64: None, name: str, field: str) -> None:
    question, step = asked(name, **ASKED.get(field, {}))
    technique = TECHNIQUES[field]
    options = technique.options(question)
    assert bool(options) != bool(technique.obstacle(question))
    taken = [value for value in options if value]
    assert not taken or field not in ALONE[name]
    for value in taken:
        assert step.in_form(StepForm(**{field: value})).graph != question.problem.graph
        assert all(isinstance(note, str) for note in technique.notes(question.problem.graph, value))


OUT = {
    "padded": {"padding": False},
    "backward_update": {"offload": "auto"},
    "segment_layers": {"remat": "selective"},
    "layered_update": {"offload": "none"},
    "block_scores": {"attention": "plain"},
}


@pytest.mark.parametrize("field", list(TECHNIQUES))
def test_options_rule_techniques_out(x64: None, field: str) -> None:
    question, _ = asked("stacks", **OUT[field])
    assert not TECHNIQUES[field].options(question)
    ((option, value),) = OUT[field].items()
    assert f"{option}={value!r}" in TECHNIQUES[field].obstacle(question)
