"""Attention in blocks in the stages of pipelines: values, what is kept, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost import CostModel
from autopar.plan import Plan
from autopar.search import Problem, Request
from autopar.search.policy import AttentionPolicy, SearchPolicy
from autopar.search.techniques import stage_block_scores
from examples import gpt, llama
from tests.end_to_end.compare import assert_same
from tests.search.problems import toy

TEXT = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 16, "seq": 8, "batch": 8}
MODELS = {
    "gpt": (gpt.build, {**TEXT, "dropout": 0.1}),
    "llama": (llama.build, {**TEXT, "kv_heads": 1}),
    "unrolled llama": (llama.build, {**TEXT, "kv_heads": 2, "unroll": True, "remat": False}),
}
CORES = ("attention", "attention_backward")


def cores(plan: Plan) -> list[str]:
    """Primitives of attention in all stages of a plan."""
    ids = (op.id for part in plan.content.parts for op in part.operators)
    names = (id.rpartition("/")[2].rpartition(".")[0] for id in ids)
    return [name for name in names if name in CORES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "remat"),
    [
        ("gpt", "1f1b", "none"),
        ("gpt", "zb_h1", "none"),
        ("llama", "gpipe", "none"),
        ("unrolled llama", "1f1b", "full"),
    ],
)
def test_values(name: str, schedule: str, remat: str) -> None:
    make, sizes = MODELS[name]
    with jax.enable_x64(True):
        step, args = make("tiny", dtype="float64", **sizes)
        options = {"num_stages": 2, "num_microbatches": 2, "schedule": schedule, "remat": remat}
        parallel = assert_same(step, args, rtol=1e-10, attention="blocks", **options)
        plan = parallel.plan(*args)
    assert [s.form.block_scores for s in plan.stages] == [1, 1]
    assert remat != "none" or "attention_backward" in cores(plan)


@pytest.mark.slow
def test_a_saved_plan_runs_in_blocks(tmp_path: Any) -> None:
    step, args = gpt.build("tiny", **TEXT)
    options = {"num_stages": 2, "num_microbatches": 2}
    plan = autopar.parallelize(step, attention="blocks", **options).plan(*args)
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(step, plan=str(tmp_path / "plan.json"))
    wanted, got = jax.jit(step)(*args), again(*args)
    assert jnp.allclose(wanted[1]["loss"], got[1]["loss"], rtol=1e-4)
    assert again.plan(*args).content.parts == plan.content.parts


@pytest.mark.slow
def test_stages_keep_no_scores() -> None:
    sizes = {**TEXT, "seq": 256, "hidden": 8}
    step, args = gpt.build("tiny", abstract=True, **sizes)
    options = {"cluster": toy(2), "num_stages": 2, "num_microbatches": 4, "schedule": "gpipe", "remat": "none"}
    plain, blocks = (autopar.parallelize(step, attention=a, **options).plan(*args) for a in ("plain", "blocks"))
    assert not cores(plain) and cores(blocks)
    # Of each example in a microbatch, head and layer: probabilities, in float32, and what the softmax has of them.
    scores_bytes = 2 * 2 * 256 * 256 * 4
    for kept, fewer in zip(plain.stages, blocks.stages, strict=True):
        assert kept.activation_bytes - fewer.activation_bytes >= scores_bytes
        assert fewer.activation_bytes < scores_bytes


def test_slices_of_tokens_take_attention_as_it_is_written() -> None:
    step, args = gpt.build("tiny", abstract=True, **TEXT)
    plan = autopar.parallelize(
        step, cluster=toy(2), num_stages=2, num_microbatches=2, attention="blocks", token_slices=2
    ).plan(*args)
    assert not cores(plan) and not any(s.form.block_scores for s in plan.stages)


def test_stages_take_the_form_that_one_stage_has() -> None:
    step, args = gpt.build("tiny", abstract=True, **TEXT)
    policy = SearchPolicy(attention=AttentionPolicy(least_scores=8 * 8))
    traced = autopar.parallelize(step, cluster=toy(2), num_stages=1, attention="plain")
    plain = traced.plan(*args)
    graph = traced.trace(*args).graph
    problem = Problem(graph, toy(2), CostModel(toy(2)), request=Request(attention="auto"), policy=policy)
    blocks = Plan(plain.content.in_blocks(64))
    asked = replace(problem, request=Request(attention="blocks"))
    assert stage_block_scores(problem, plain) == 0
    assert stage_block_scores(problem, blocks) == stage_block_scores(problem, None) == 64
    assert stage_block_scores(asked, plain) == 1
    assert stage_block_scores(replace(problem, request=Request(attention="plain")), None) == 0
