"""The contract of techniques on the planner's side: what is offered changes the step, and options rule it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autopar.api.steps import TracedStep
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.frontend import Traced
from autopar.lower.techniques import FIRST
from autopar.lower.techniques import TECHNIQUES as LOWERED
from autopar.microbatch import even_counts
from autopar.plan import StepForm
from autopar.plan.form import TECHNIQUES as NAMED
from autopar.search import Problem
from autopar.search.alpa import alpa
from autopar.search.job import Job, Request
from autopar.search.one_stage import problem_in_form
from autopar.search.techniques import (
    Asked,
    block_scores,
    layered_updates,
    levels_of,
    may_hold_activations_on_hosts,
    may_update_in_backward,
    may_update_on_hosts,
    padded_dims,
    segments_of,
)
from autopar.sharding.padding import candidates
from examples import gpt
from tests.end_to_end.test_checkpoints_on_host import cluster as with_hosts
from tests.end_to_end.test_padding_in_stages import model as uneven
from tests.end_to_end.test_segments import activations
from tests.end_to_end.test_update_in_backward import adam
from tests.lower.test_techniques import ALONE, made
from tests.microbatch.running import traced

#: By field of `StepForm` the values that are worth a try.
OFFERED: dict[str, Callable[[Asked], Sequence[Any]]] = {
    "padded": padded_dims,
    "remat": lambda asked: levels_of(asked.problem.job.remat),
    "backward_update": lambda asked: [may_update_in_backward(asked)],
    "segment_layers": segments_of,
    "layered_update": layered_updates,
    "microbatches": lambda asked: even_counts(asked.problem.graph),
    "block_scores": lambda asked: [block_scores(asked.problem)],
    "host_update": lambda asked: [may_update_on_hosts(asked)],
    "activations_offloaded": lambda asked: [may_hold_activations_on_hosts(asked)],
}
#: By technique the options that let it be tried.
ASKED: dict[str, dict[str, Any]] = {
    "layered_update": {"offload": "auto"},
    "block_scores": {"attention": "blocks"},
    "host_update": {"offload": "auto"},
    "activations_offloaded": {"offload": "auto"},
}
#: Techniques that change where things lie, and no graph.
PLACES = ("host_update", "activations_offloaded")


def asked(name: str, **options: Any) -> tuple[Asked, TracedStep]:
    """A model with some options on two devices."""
    found, _, _ = made(name)
    step, cluster = TracedStep(found, (), (), 2), with_hosts(2, 1e9)
    wishes = {"padding": True, **{k: v for k, v in options.items() if k in ("padding", "attention")}}
    job = Job(**{k: v for k, v in options.items() if k not in wishes and k != "attention"})
    problem = Problem(found.graph, cluster, CostModel(cluster), Request(**wishes), job)
    answers = {
        "updates_by_layer": step.may_update_by_layer,
        "updates_in_backward": lambda: step.update_in_backward()[0],
    }
    return Asked(problem, **answers, in_flight=8), step


def taken(question: Asked, field: str) -> list[Any]:
    """Values of a technique that are offered, but for that of a step without it."""
    return [value for value in OFFERED[field](question) if value != getattr(StepForm(), field)]


def test_names_are_those_of_lowering() -> None:
    applied = [t.field for t in (*FIRST, *LOWERED)]
    assert {*applied, *PLACES} == OFFERED.keys()
    assert {t.field for t in NAMED} <= OFFERED.keys()


@pytest.mark.few(5)
@pytest.mark.parametrize("field", list(OFFERED))
@pytest.mark.parametrize("name", ["flat", "stacks", pytest.param("text", marks=pytest.mark.slow)])
def test_what_is_offered_changes_the_step(x64: None, name: str, field: str) -> None:
    question, step = asked(name, **ASKED.get(field, {}))
    values = taken(question, field)
    assert not values or field not in ALONE[name]
    for value in values:
        changed = step.in_form(StepForm(**{field: value})).graph != question.problem.graph
        assert changed == (field not in PLACES)


OUT = {
    "padded": {"padding": False},
    "backward_update": {"offload": "auto"},
    "segment_layers": {"remat": "selective"},
    "layered_update": {"offload": "none"},
    "block_scores": {"attention": "plain"},
    "remat": {"remat": "none"},
    "host_update": {"offload": "none"},
    "activations_offloaded": {"offload": "none"},
}


def attention() -> tuple[Any, Any]:
    """A block of a GPT whose scores are most of its memory."""
    return gpt.build("tiny", layers=1, hidden=16, heads=4, vocab=16, seq=64, batch=4, scan=False, dtype="float64")


#: By technique a step whose least memory it lowers, the value, and options. Activations of microbatches in flight are
#: those of stages: see `tests/schedule`.
SMALLER: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "padded": (lambda: uneven(vocab=255, width=15), None, {}),
    "remat": (lambda: uneven(vocab=16, width=16, rows=2048, layers=12), "full", {}),
    "backward_update": (adam, True, {}),
    "segment_layers": (lambda: activations(remat=False), 4, {}),
    "layered_update": (adam, True, {"offload": "layers"}),
    "microbatches": (lambda: activations(remat=False), 4, {}),
    "block_scores": (attention, 1, {}),
    "host_update": (adam, True, {"offload": "auto"}),
}


def least_bytes(form: StepForm, found: Traced, devices: int, options: dict[str, Any]) -> int:
    """Bytes that the least plan of a form needs, by the error of one that has far too few."""
    step, cluster = TracedStep(found, (), (), devices), with_hosts(devices, 1e9)
    donated = frozenset(i.name for i in found.graph.inputs if i.role in ("parameter", "optimizer"))
    job = Job(**options, memory_limit_bytes=100, donated=donated)
    problem = problem_in_form(Problem(found.graph, cluster, CostModel(cluster), Request(), job), step.in_form(form))
    with pytest.raises(InfeasiblePlanError) as error:
        alpa(problem)
    assert error.value.least_bytes is not None
    return error.value.least_bytes


@pytest.mark.parametrize("field", [pytest.param(f, marks=() if f == "remat" else pytest.mark.slow) for f in SMALLER])
def test_predicted_memory_falls(x64: None, field: str) -> None:
    """By a twentieth at least, of the least that any sharding needs."""
    build, value, options = SMALLER[field]
    found, _ = traced(*build())
    devices = 1
    if field == "padded":  # one device divides all dims
        devices, value = 2, tuple(d for c in candidates(found.graph, 2, 0.5) for d in c.dims(found.graph))
    plain = least_bytes(StepForm(), found, devices, options)
    assert least_bytes(StepForm(**{field: value}), found, devices, options) < 0.95 * plain
    assert SMALLER.keys() | {"activations_offloaded"} == OFFERED.keys()


@pytest.mark.parametrize("field", list(OUT))
def test_options_rule_techniques_out(x64: None, field: str) -> None:
    question, _ = asked("stacks", **OUT[field])
    assert not taken(question, field)
