"""The sentence that names a plan, and its arguments in groups."""

from __future__ import annotations

import msgspec
import pytest

from autopar.plan import InputRecord, Memory, StepForm
from autopar.plan.arguments import input_groups
from autopar.plan.words import plan_words
from tests.plan.plans import small_plan

BLOCKS = 3


def content(batch="[x,.]", weights="[.,.]", state="[.,.]", table="[.,.]", stages=1, microbatches=1, **of_stage):
    inputs = [InputRecord("batch['tokens']", "i32[32,16]", "batch", batch)]
    inputs += [
        InputRecord(f"state.opt_state[0].mu['blocks'][{n}]['w']", "f32[64,64]", "optimizer", state)
        for n in range(BLOCKS)
    ]
    inputs += [
        InputRecord(f"state.params['blocks'][{n}]['w']", "f32[64,64]", "parameter", weights, n % stages)
        for n in range(BLOCKS)
    ]
    inputs.append(InputRecord("state.params['embedding']", "f32[512,8]", "parameter", table))
    c = small_plan().content
    stage = msgspec.structs.replace(c.stages[0], mesh_axes=(("x", 4), ("y", 2)), **of_stage)
    changed = {"stages": (stage,) * stages, "inputs": tuple(inputs), "num_microbatches": microbatches}
    return msgspec.structs.replace(c, **changed)


@pytest.mark.parametrize(
    ("of_plan", "words"),
    [
        ({}, "4-way data parallel, repeated on 2 groups of devices"),
        ({"batch": "[.,.]"}, "arguments whole on every device"),
        ({"batch": "[x+y,.]", "state": "[x+y,.]"}, "8-way data parallel, optimizer state split 8 ways (ZeRO-1 and 2)"),
        (
            {"state": "[.,x]", "accumulation_bytes": 100, "memory": Memory(parameters=400), "microbatches": 2},
            "4-way data parallel, optimizer state split 4 ways in 2 copies (ZeRO-2), "
            "repeated on 2 groups of devices, gradients accumulated over 2 microbatches",
        ),
        (
            {"weights": "[x,.]", "state": "[x,.]"},
            "4-way data parallel, 75% of parameters and gradients split 4 ways in 2 copies (ZeRO-3), "
            "optimizer state split 4 ways in 2 copies, repeated on 2 groups of devices",
        ),
        (
            {"weights": "[.,y]", "table": "[y,.]"},
            "4-way data parallel, 2-way tensor parallel by columns, state.params['embedding'] split by vocabulary",
        ),
        ({"batch": "[x,y]"}, "4-way data parallel, 2-way context parallel"),
        (
            {"stages": 2},
            "pipeline of 2 stages (1f1b, 1 microbatch), 4-way data parallel, repeated on 2 groups of devices",
        ),
        (
            {"stages": 3, "microbatches": 4, "form": StepForm(remat="full")},
            "pipeline of 3 stages (1f1b, 4 microbatches), 4-way data parallel, repeated on 2 groups of devices, "
            "full recomputation",
        ),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v,
)
def test_words(of_plan, words):
    assert plan_words(content(**of_plan)) == words


def test_few_parameters_that_are_whole_are_most_of_what_a_device_holds():
    """In eight parts the others take an eighth of their bytes: 4% that are whole are a quarter of the memory."""
    c = content(batch="[x+y,.]", weights="[x+y,.]", state="[x+y,.]")
    narrow = [msgspec.structs.replace(i, type="f32[512,1]") if "embedding" in i.path else i for i in c.inputs]
    words = plan_words(msgspec.structs.replace(c, inputs=tuple(narrow)))
    assert "96% of parameters and gradients split 8 ways (ZeRO-3)" in words
    assert ", optimizer state split 8 ways" in words


def test_the_batch_is_first_and_optimizer_state_follows_its_parameter():
    assert [g.title for g in input_groups(content().inputs)] == [
        "batch['tokens']",
        "state.params['blocks'][*]['w'] x 3",
        "state.opt_state[0].mu['blocks'][*]['w'] x 3",
        "state.params['embedding']",
    ]


def test_layers_that_lie_otherwise_have_a_row_of_their_own():
    c = content()
    other = [msgspec.structs.replace(i, layout="[x,.]") if "params['blocks'][1]" in i.path else i for i in c.inputs]
    titles = [g.title for g in input_groups(other)]
    assert "state.params['blocks'][1]['w']" in titles and "state.params['blocks'][*]['w'] x 2" in titles
    assert sum(len(g.members) for g in input_groups(other)) == len(other)
