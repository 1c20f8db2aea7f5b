"""Pipelines train to the same values as the plain function on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoparError, MicrobatchError
from autopar.schedule import schedules
from autopar.schedule.without_flush.schedules import flushes
from examples import gpt, llama, mlp, moe, wide_resnet
from tests.end_to_end.compare import assert_same
from tests.runtime.observing import observed

TEXT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8}
MODELS = {
    "mlp": (mlp.build, {}),
    "uneven mlp": (mlp.build, {"layers": 5}),
    "gpt": (gpt.build, {**TEXT, "heads": 2, "vocab": 16, "dropout": 0.1, "clip": 1.0, "masked": True}),
    "deep gpt": (gpt.build, {**TEXT, "layers": 4}),
    "llama": (llama.build, {**TEXT, "kv_heads": 2, "layers": 4}),
    "short llama": (llama.build, {**TEXT, "heads": 2, "kv_heads": 2, "vocab": 16}),
    "scanned gpt": (
        gpt.build,
        {**TEXT, "layers": 4, "heads": 2, "vocab": 16, "dropout": 0.1, "scan": True, "remat": True},
    ),
    "moe": (moe.build, {}),
    "wide_resnet": (wide_resnet.build, {}),
}
TRAINING = tuple(s for s in schedules() if s not in ("inference", "table", "ampnet", "branches") and flushes(s))


def compare(name, stages, microbatches, schedule, steps=3):
    build, overrides = MODELS[name]
    with jax.enable_x64(True):
        fn, args = build(dtype="float64", **overrides)
        return assert_same(
            fn,
            args,
            steps=steps,
            rtol=1e-10,
            num_stages=stages,
            num_microbatches=microbatches,
            schedule=schedule,
        )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(schedule):
    compare("mlp", 4 if schedule in ("interleaved", "zb-v") else 2, 4, schedule, steps=2)


@pytest.mark.slow
def test_tied_embeddings_dropout_and_clipping():
    compare("gpt", 2, 2, "1f1b", steps=1)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_metric_that_is_sent_to_the_next_stage_too(microbatches):
    """As the auxiliary loss of a mixture of experts: a result of the step, and a term of the loss."""

    def step(params, batch):
        def loss(params):
            h = jnp.tanh(batch["x"] @ params[0])
            auxiliary = jnp.mean(h**2)
            h = jnp.tanh(h @ params[1])
            return jnp.mean(h**2) + 0.1 * auxiliary, auxiliary

        (value, auxiliary), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return [p - g for p, g in zip(params, grads, strict=True)], {"loss": value, "auxiliary": auxiliary}

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        params = [jax.random.normal(k, (16, 16)) for k in keys[:2]]
        args = (params, {"x": jax.random.normal(keys[2], (8, 16))})
        assert_same(step, args, steps=2, rtol=1e-10, num_stages=2, num_microbatches=microbatches, schedule="1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["short llama", pytest.param("scanned gpt", marks=pytest.mark.slow)])
def test_scanned_layers_are_cut(model):
    """Stacked parameters lie in parts on the stages of their layers."""
    found = compare(model, 2, 2, "1f1b", steps=1)
    (compiled,) = found._plain.compiled.values()
    assert compiled.local.places.leaves
    assert all(len(leaf.runs) == 2 for leaf in compiled.local.places.leaves.values())


def in_flight(schedule, stages, microbatches):
    """By worker the most microbatches whose activations may be held (Narayanan et al., SC'21, section 2.2)."""
    return [microbatches if schedule == "gpipe" else min(microbatches, stages - s) for s in range(stages)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_more_is_held_than_the_formulas_say(schedule):
    fn, args = mlp.build()
    step = autopar.parallelize(fn, num_stages=2, num_microbatches=4, schedule=schedule)
    most = [0, 0]

    def observe(_, arrays):
        for worker in range(2):
            held = {b.microbatch for b in arrays[worker] if b.value.startswith("activation/")}
            most[worker] = max(most[worker], len(held))

    observed(step.compile(*args).local, jax.tree.leaves(args), observe)
    assert most == in_flight(schedule, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_named_by_hand(chunks):
    fn, args = mlp.build()
    named = autopar.search.Manual(tp=2, dp=2, pp=2, zero=1, chunks=chunks)
    step = autopar.parallelize(fn, search=named, num_microbatches=4)
    plan = step.plan(*args)
    assert (plan.num_stages, plan.num_microbatches) == (2 * chunks, 4)
    assert plan.schedule == ("1f1b" if chunks == 1 else "interleaved")
    assert all(s.mesh_shape == {"x": 2, "y": 2} for s in plan.stages)
    got, want = step(*args), jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_pipeline_plan_is_reloaded_and_runs():
    fn, args = mlp.build()
    plan = autopar.parallelize(fn, num_stages=2, num_microbatches=2, schedule="gpipe").plan(*args)
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (2, 2, "gpipe")
    again = autopar.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert autopar.simulate(again).step_time == pytest.approx(plan.step_time)
    got = autopar.parallelize(fn, plan=again)(*args)
    want = jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_state_lies_on_its_stages():
    fn, args = mlp.build()
    step = autopar.parallelize(fn, num_stages=2, num_microbatches=2)
    state, _ = step(*args)
    first = state["params"][0]["w"].sharding.device_set
    last = state["params"][-1]["w"].sharding.device_set
    assert len(first) == len(last) == 4
    assert not first & last
    made = step.init(lambda: jax.tree.map(lambda x: x * 1, args[0]))
    assert made["params"][-1]["w"].sharding == state["params"][-1]["w"].sharding


def test_impossible_requests_say_what_would_do():
    fn, args = mlp.build()
    with pytest.raises(MicrobatchError, match="3 microbatches do not divide"):
        autopar.parallelize(fn, num_stages=2, num_microbatches=3).plan(*args)
    with pytest.raises(AutoparError, match="stages"):
        autopar.parallelize(fn, num_stages=64, num_microbatches=2).plan(*args)
    with pytest.raises(AutoparError, match="2f2b"):
        autopar.parallelize(fn, schedule="2f2b")
