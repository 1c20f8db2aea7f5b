"""Steps whose plan splits the tokens of examples over devices return what they return on one."""

from __future__ import annotations

import jax
import pytest

from autopar.search import Manual
from examples import gpt, llama, moe
from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.compare import assert_same

TEXT = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}


def case(name):
    """``(build, overrides)`` of a small instance."""
    return {
        "gpt": (gpt.build, TEXT),
        "gpt of two layers": (gpt.build, {**TEXT, "layers": 2}),
        "gpt dropout": (gpt.build, {**TEXT, "dropout": 0.1, "masked": True}),
        "llama": (llama.build, {**TEXT, "layers": 2, "kv_heads": 2}),
        "moe": (moe.build, {"gate": "gshard"}),
    }[name]


def compare(name, grid, steps=2, **options):
    """The plan under which the example's step was found to return what the plain step does."""
    build, overrides = case(name)
    with jax.enable_x64(True):
        fn, args = build(dtype="float64", **overrides)
        parallel = assert_same(fn, args, steps=steps, rtol=1e-10, cluster=MIDDLE, search=grid, **options)
        return parallel.plan(*args)


def batch_layouts(records):
    return {r.path: r.layout for r in records if r.role == "batch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grid", "layout"),
    [
        ("gpt", Manual(cp=2, tp=2, dp=2), "[x,y]"),
        ("llama", Manual(cp=4, tp=2), "[.,x]"),
        pytest.param("llama", Manual(cp=2, dp=4, zero=3), "[x,y]", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_shared(name, grid, layout):
    plan = compare(name, grid)
    assert set(batch_layouts(plan.content.inputs).values()) == {layout}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "grid", "layout"),
    [
        ("gpt", Manual(cp=8), "[.,x]"),
        ("gpt", Manual(cp=4, dp=2, zero=1), "[x,y]"),
        ("gpt dropout", Manual(cp=2, tp=2, dp=2), "[x,y]"),
        ("llama", Manual(cp=2, tp=2, dp=2), "[x,y]"),
        ("moe", Manual(cp=2, dp=4, ep=2), "[x+y,z]"),
    ],
)
def test_tokens_are_shared_in_more_ways(name, grid, layout):
    plan = compare(name, grid, steps=3)
    token = {k: v for k, v in batch_layouts(plan.content.inputs).items() if "rng" not in k}
    assert set(token.values()) == {layout}


@pytest.mark.slow
def test_stages_of_a_pipeline_share_tokens():
    plan = compare("gpt of two layers", Manual(pp=2, cp=2, dp=2), num_microbatches=4)
    assert [s.mesh_shape for s in plan.stages] == [{"x": 2, "y": 2}] * 2
    first, last = (batch_layouts(c.inputs) for c in plan.content.parts)
    assert first["piece/batch['tokens']"] == last["piece/batch['labels']"] == "[x,y]"
    sent = [v for k, v in (*first.items(), *last.items()) if k.startswith("from/")]
    assert sent == ["[x,y,.]", "[x,y,.]"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("grid", "stages"), [(Manual(pp=2, cp=4, zero=1), 2), (Manual(pp=2, cp=2, tp=2), 2), (Manual(pp=4, cp=2), 4)]
)
def test_pipelines_of_more_shapes(grid, stages):
    plan = compare("gpt of two layers", grid, num_microbatches=2)
    assert plan.num_stages == stages
    assert all(s.mesh_shape["x"] == grid.cp for s in plan.stages)
