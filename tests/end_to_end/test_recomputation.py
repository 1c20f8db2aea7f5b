"""What is recomputed in the backward pass has the values that it had, and is not held."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar import AutoparError
from examples import gpt, llama, mlp, moe
from tests.end_to_end.compare import assert_same
from tests.runtime.observing import observed

TEXT = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 16, "seq": 4, "batch": 4}
MODELS = {
    "mlp": (mlp.build, {"layers": 6}),
    "gpt": (gpt.build, {**TEXT, "dropout": 0.1, "clip": 1.0}),
    "llama": (llama.build, {**TEXT, "kv_heads": 2, "layers": 4}),
    "moe": (moe.build, {}),
}


def compare(name, level, steps=2, **options):
    build, overrides = MODELS[name]
    with jax.enable_x64(True):
        fn, args = build(dtype="float64", **overrides)
        return assert_same(fn, args, steps=steps, rtol=1e-10, remat=level, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "zb-h1"])
def test_pipelines(schedule):
    compare("mlp", "full", num_stages=2, num_microbatches=4, schedule=schedule)


def test_what_joins_terms_of_several_stages_is_in_no_layer():
    """Chunks of a model with uneven layers: the mean of the loss runs once, after the last microbatch."""
    fn, args = mlp.build(layers=5, abstract=True)
    plan = autopar.parallelize(fn, num_stages=4, num_microbatches=2, schedule="interleaved", remat="full").plan(*args)
    assert [s.form.remat for s in plan.stages] == ["full"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_stage(microbatches):
    compare("mlp", "full", num_stages=1, num_microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("stages", [1, 2])
def test_models(name, level, stages):
    compare(name, level, num_stages=stages, num_microbatches=2, schedule="none" if stages == 1 else "1f1b", steps=5)


def held(level):
    """By worker the most bytes held for the backward pass in a step of a pipeline, counted; and as planned."""
    fn, args = mlp.build(layers=8, batch=16)
    step = autopar.parallelize(fn, num_stages=2, num_microbatches=4, schedule="gpipe", remat=level, mesh_shape=(4,))
    compiled = step.compile(*args)
    most = [0, 0]

    def observe(_, arrays):
        for worker in range(2):
            saved = [a for b, a in arrays[worker].items() if b.value.startswith("activation/")]
            most[worker] = max(most[worker], sum(a.addressable_shards[0].data.nbytes for a in saved))

    observed(compiled.local, jax.tree.leaves(args), observe)
    return most, compiled.plan


@pytest.mark.slow
def test_what_is_held_shrinks_as_the_plan_says():
    kept, plain = held("none")
    recomputing, plan = held("full")
    assert [s.form.remat for s in plan.stages] == ["full", "full"]
    assert kept == [4 * s.activation_bytes for s in plain.stages]
    assert recomputing == [4 * s.activation_bytes for s in plan.stages]
    assert all(0 < a < b for a, b in zip(recomputing, kept, strict=True))
    backward = [[dict(s.work_times)["backward"] for s in p.stages] for p in (plain, plan)]
    assert all(a < b for a, b in zip(*backward, strict=True))


def test_the_plan_says_so_and_is_reloaded():
    fn, args = mlp.build(layers=6)
    plan = autopar.parallelize(fn, num_stages=2, num_microbatches=2, remat="full").plan(*args)
    again = autopar.Plan.from_json(plan.to_json())
    assert again == plan
    assert "recomputed:  stage 0: full, stage 1: full" in str(plan)
    got = autopar.parallelize(fn, plan=again)(*args)
    want = jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.numpy.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_unknown_level_is_refused():
    with pytest.raises(AutoparError, match="remat='some'"):
        autopar.parallelize(lambda x: x, remat="some")
