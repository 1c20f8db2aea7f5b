"""The sentence that names a plan: plans made by name have it, and what it splits takes as many bytes."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import autopar
from autopar.ir import Layout
from autopar.plan.types import dtype_and_shape
from autopar.plan.words import plan_words
from autopar.search import Manual
from tests.search.problems import f32, momentum, toy

DATA, TENSOR = "8-way data parallel", "by columns and rows (Megatron)"
STATE = "parameters, gradients and optimizer state split"


def perceptron(*tokens):
    """Four matrices in two layers; the batch has examples, and tokens if asked for."""

    def loss(layers, x, y):
        for up, down in layers:
            x = x + jnp.tanh(x @ up) @ down
        return ((x - y) ** 2).mean()

    batch = f32(32, *tokens, 32)
    return momentum(loss, [(f32(32, 128), f32(128, 32))] * 2, batch, batch)


def experts():
    """A matrix of all tokens and two of each of eight experts."""

    def loss(weights, x, y):
        shared, up, down = weights
        x = jnp.tanh(x @ shared)
        routed = jnp.einsum("bse,bsf->ebsf", jax.nn.softmax(x[..., :8]), x)
        inner = jnp.tanh(jnp.einsum("ebsf,efg->ebsg", routed, up))
        return ((jnp.einsum("ebsg,egf->ebsf", inner, down).sum(0) - y) ** 2).mean()

    batch = f32(32, 16, 32)
    return momentum(loss, (f32(32, 32), f32(8, 32, 128), f32(8, 128, 32)), batch, batch)


def planned(build, options, *build_args, **of_step):
    step, args = build(*build_args)
    manual = Manual(**options)
    return autopar.parallelize(step, cluster=toy(8), search=manual, donate_argnums=0, **of_step).plan(*args)


def shards(plan, i):
    sizes = plan.stages[i.stage].mesh_shape
    return math.prod(sizes[a] for a in Layout.parse(i.layout).axes)


def elements(i):
    return math.prod(dtype_and_shape(i.type)[1])


def stated_ways(words, use):
    return int(found[1]) if (found := re.search(rf"(\d+)-way {use} parallel", words)) else 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 8}, DATA),
        ({"dp": 8, "zero": 1}, f"{DATA}, optimizer state split 8 ways (ZeRO-1 and 2)"),
        ({"dp": 8, "zero": 2}, f"{DATA}, optimizer state split 8 ways (ZeRO-1 and 2)"),
        ({"dp": 8, "zero": 3}, f"{DATA}, {STATE} 8 ways (ZeRO-3)"),
        ({"tp": 8}, f"8-way tensor parallel {TENSOR}"),
        ({"tp": 2, "dp": 4}, f"4-way data parallel, 2-way tensor parallel {TENSOR}"),
        ({"tp": 2, "dp": 4, "zero": 3},
         f"4-way data parallel, 2-way tensor parallel {TENSOR}, {STATE} 4 ways (ZeRO-3)"),
        ({"cp": 8}, "8-way context parallel"),
        ({"cp": 2, "dp": 4, "zero": 3}, f"4-way data parallel, 2-way context parallel, {STATE} 8 ways (ZeRO-3)"),
        ({"tp": 2, "cp": 2, "dp": 2}, f"2-way data parallel, 2-way context parallel, 2-way tensor parallel {TENSOR}"),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_made_by_name_has_that_name_and_splits_what_it_says(options, words):
    plan = planned(perceptron, options, 16)
    said = plan_words(plan.content)
    assert said == words
    zero = int(found[1]) if (found := re.search(r"split (\d+) ways", said)) else 1
    matrices = stated_ways(said, "tensor")
    for i in plan.content.inputs:
        if i.role == "batch":
            assert shards(plan, i) == stated_ways(said, "data") * stated_ways(said, "context")
        elif i.role == "parameter":
            assert shards(plan, i) == matrices * (zero if "ZeRO-3" in said else 1)
        else:
            assert shards(plan, i) == matrices * zero
    state = sum(elements(i) * 4 // shards(plan, i) for i in plan.content.inputs if i.role != "batch")
    whole = sum(elements(i) * 4 for i in plan.content.inputs if i.role != "batch")
    assert plan.stages[0].state_bytes == state
    if "ZeRO-3" in said or options == {"tp": 8}:
        assert state == whole // (matrices * zero)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp": 2, "dp": 4}, "4-way data parallel"),
        ({"pp": 2, "tp": 4}, f"4-way tensor parallel {TENSOR}"),
        ({"pp": 2, "dp": 2, "tp": 2, "zero": 3},
         f"2-way data parallel, 2-way tensor parallel {TENSOR}, {STATE} 2 ways (ZeRO-3)"),
    ],
    ids=str,
)  # fmt: skip
def test_pipelines_made_by_name(options, words):
    plan = planned(perceptron, options, 16, num_microbatches=4)
    assert plan_words(plan.content) == f"pipeline of 2 stages (1f1b, 4 microbatches), {words}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 8, "ep": 8}, f"{DATA}, 8-way expert parallel"),
        ({"dp": 8, "ep": 4}, f"{DATA}, 4-way expert parallel"),
        ({"dp": 8, "ep": 4, "zero": 3}, f"{DATA}, 4-way expert parallel, {STATE} 2 ways (ZeRO-3)"),
        ({"dp": 4, "ep": 4, "tp": 2},
         f"4-way data parallel, 4-way expert parallel, 2-way tensor parallel {TENSOR}"),
    ],
    ids=str,
)  # fmt: skip
def test_experts_made_by_name(options, words):
    assert plan_words(planned(experts, options).content) == words


@pytest.mark.parametrize(
    "degrees",
    [{"dp": 8}, {"dp": 2, "tp": 4}, {"pp": 2, "dp": 4}, {"pp": 4, "dp": 2}, {"pp": 2, "dp": 2, "tp": 2},
     {"cp": 2, "dp": 4}],
    ids=str,
)  # fmt: skip
def test_zero_2_adds_gradients_of_microbatches_up_in_parts(degrees):
    """The steps of ZeRO-1 and 2 differ by where gradients are added up: whole, or where the optimizer state is."""
    first, second = (planned(perceptron, {**degrees, "zero": n}, 16, num_microbatches=4) for n in (1, 2))
    parts = degrees.get("dp", 1) * degrees.get("cp", 1)
    assert f"split {parts} ways (ZeRO-1)" in plan_words(first.content)
    assert f"split {parts} ways (ZeRO-2)" in plan_words(second.content)
    assert [(i.path, i.stage, shards(first, i)) for i in first.content.inputs] == [
        (i.path, i.stage, shards(second, i)) for i in second.content.inputs
    ]
    for number, (a, b) in enumerate(zip(first.stages, second.stages, strict=True)):
        held = [i for i in first.content.inputs if i.role == "parameter" and i.stage == number]
        whole = sum(4 * elements(i) // shards(first, i) for i in held)
        of_gradients = [s.accumulation_bytes or s.memory.gradients for s in (a, b)]
        assert of_gradients[0] >= whole and of_gradients[0] - of_gradients[1] == whole - whole // parts
    scatters = [sum(c.count for c in p.communication if c.kind == "reduce-scatter") for p in (first, second)]
    assert scatters[1] > scatters[0]
    assert not [n for n in second.notes if n.startswith("zero=")]


@pytest.mark.parametrize("degrees", [{"dp": 8}, {"pp": 2, "dp": 4}, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_zero_2_of_microbatches_runs(degrees, x64):
    step, args = perceptron(16)
    state, *batch = (jax.tree.map(lambda s: numbers(s.shape), a) for a in args)
    manual = Manual(**degrees, zero=2)
    options = {"cluster": autopar.Cluster.local(), "num_microbatches": 4}
    decorated = autopar.parallelize(step, search=manual, **options)
    want = step(state, *batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), decorated(state, *batch), want)


def numbers(shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) / 8)


@pytest.mark.parametrize(
    ("degrees", "note"),
    [
        ({"dp": 8, "zero": 2}, "zero=2 is the plan of zero=1 here"),
        ({"dp": 2, "tp": 4, "zero": 2}, "zero=2 is the plan of zero=1 here"),
        ({"tp": 8, "zero": 1}, "zero=1 splits nothing"),
        ({"tp": 8, "zero": 3}, "zero=3 splits nothing"),
        ({"pp": 2, "tp": 4, "zero": 2}, "zero=2 splits nothing"),
        ({"dp": 8, "zero": 1}, None),
        ({"dp": 8, "zero": 3}, None),
        ({"cp": 8, "zero": 1}, None),
    ],
    ids=str,
)
def test_a_stage_of_zero_that_changes_nothing_says_so(degrees, note):
    count = 4 if "pp" in degrees else 1
    found = [planned(perceptron, {**degrees, "zero": n}, 16, num_microbatches=count) for n in {0, 1, degrees["zero"]}]
    notes = [n for n in found[-1].notes if n.startswith("zero=")]
    assert len(notes) == (note is not None) and all(n.startswith(note) for n in notes)
    if note is not None:
        assert any(p.content.stages == found[-1].content.stages for p in found[:-1])


@pytest.mark.parametrize(("zero", "count"), [(1, 1), (2, 1), (1, 4), (2, 4), (3, 1)])
def test_a_step_without_optimizer_state_says_that_zero_splits_none(zero, count):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - gradient, value

    manual = Manual(dp=8, zero=zero)
    plan = autopar.parallelize(step, cluster=toy(8), search=manual, num_microbatches=count).plan(
        f32(32, 64), f32(64, 32)
    )
    notes = [n for n in plan.notes if n.startswith("zero=")]
    splits = zero == 3 or (zero == 2 and count > 1)
    assert notes == ([] if splits else [f"zero={zero} splits nothing: the step has no optimizer state"])


def test_labels_split_by_examples_do_not_make_an_axis_one_of_data_parallelism():
    content = planned(perceptron, {"tp": 8}, 16).content
    inputs = tuple(
        msgspec.structs.replace(i, layout="[x,.,.]") if i.role == "batch" else i for i in content.inputs
    )  # fmt: skip
    said = plan_words(msgspec.structs.replace(content, inputs=inputs))
    assert said == f"8-way tensor parallel {TENSOR}"


def test_layers_split_in_groups_have_copies():
    """As a model of 70B on 64 x 8: layers split 8 ways in 8 copies here, and a table over all devices."""
    content = planned(perceptron, {"dp": 8, "zero": 3}, 16).content
    stage = msgspec.structs.replace(
        content.stages[0],
        mesh_axes=(("x", 8), ("y", 8)),
        axis_roles=tuple(msgspec.structs.replace(content.stages[0].axis_roles[0], axis=a) for a in "xy"),
    )
    table = msgspec.structs.replace(
        next(i for i in content.inputs if i.role == "parameter"), path="embedding", type="f32[64,32]", layout="[x+y,.]"
    )
    changed = msgspec.structs.replace(content, stages=(stage,), inputs=(*content.inputs, table))
    said = plan_words(changed)
    assert f"{STATE} 8 ways in 8 copies (ZeRO-3)" in said and "64 ways" not in said


@pytest.mark.parametrize("sizes", [(64, 62), (62, 64)])
def test_images_split_by_space(sizes):
    def loss(weights, x, y):
        for w in weights:
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return ((x - y) ** 2).mean()

    step, args = momentum(loss, [f32(3, 3, 8, 8)] * 2, *[f32(1, *sizes, 8)] * 2)
    plan = autopar.parallelize(
        step, cluster=toy(4), mesh_shape=(4,), num_stages=1, num_microbatches=1, donate_argnums=0
    ).plan(*args)
    assert plan_words(plan.content).startswith("4-way spatial parallel")


def test_plans_without_roles_are_named_by_their_arguments():
    content = planned(perceptron, {"tp": 2, "dp": 4, "zero": 3}, 16).content
    stages = tuple(msgspec.structs.replace(s, axis_roles=()) for s in content.stages)
    assert plan_words(msgspec.structs.replace(content, stages=stages)) == plan_words(content)


@pytest.mark.parametrize("of_tensor", [0.2, 0.8])
def test_parameters_are_gathered_over_axes_that_mostly_split_examples(of_tensor):
    """An axis with two uses: parameters that it splits count as ZeRO-3 where fewer products are split by their dims."""
    content = planned(perceptron, {"tp": 2, "dp": 4}, 16).content
    axes = {r.axis: r for r in content.stages[0].axis_roles if r.use == "tensor"}
    roles = [r for r in content.stages[0].axis_roles if r.use != "tensor"]
    for axis, role in axes.items():
        roles += [
            msgspec.structs.replace(role, share=of_tensor),
            msgspec.structs.replace(role, use="data", share=1 - of_tensor),
        ]
        assert axis in {a for i in content.inputs if i.role == "parameter" for a in Layout.parse(i.layout).axes}
    stage = msgspec.structs.replace(content.stages[0], axis_roles=tuple(roles))
    said = plan_words(msgspec.structs.replace(content, stages=(stage,)))
    assert ("(Megatron)" in said) == (of_tensor > 0.5)
    assert (f"{STATE} 2 ways in 4 copies (ZeRO-3)" in said) == (of_tensor < 0.5)
