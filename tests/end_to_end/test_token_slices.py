"""Pipelines in slices of tokens: the same numbers as the undecorated step, and what cannot be cut says why."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, ScheduleError, SliceError
from examples import gpt, llama

SMALL = {"dtype": "float64", "layers": 2, "hidden": 8, "heads": 4, "vocab": 16, "seq": 6, "batch": 4}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def assert_same(fn, step, args, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(fn(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.linalg.norm((a - b).ravel()) <= rtol * max(np.linalg.norm(b.ravel()), 1e-12)


def sliced(step, devices=8, **options):
    cluster = autopar.Cluster.local(jax.devices()[:devices])
    return autopar.parallelize(step, cluster=cluster, num_stages=2, **{"num_microbatches": 2, **options})


def test_slices_of_two_stages_are_planned():
    step, args = gpt.build(**SMALL)
    plan = sliced(step, devices=2, schedule="1f1b", token_slices=(3, 2, 1)).plan(*args)
    assert plan.content.pipeline.slice_lengths == (3, 2, 1)
    assert "2 stages, 2 microbatches, 1f1b, slices of 3, 2, 1 tokens" in str(plan)
    timeline = autopar.simulate(plan)
    assert timeline.step_time == pytest.approx(plan.step_time)


@pytest.mark.slow
def test_slices_of_two_stages():
    step, args = gpt.build(**SMALL)
    fn = sliced(step, schedule="1f1b", token_slices=(3, 2, 1))
    assert fn.plan(*args).content.pipeline.slice_lengths == (3, 2, 1)
    assert_same(fn, step, args)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "eager-1f1b"])
def test_schedules(schedule):
    step, args = gpt.build(**SMALL)
    assert_same(sliced(step, schedule=schedule, token_slices=2), step, args)


@pytest.mark.slow
def test_llama_and_saved_plans(tmp_path):
    # As many examples as devices: their dim is split, not that of tokens.
    sizes = {**{k: v for k, v in SMALL.items() if k != "layers"}, "batch": 16}
    step, args = llama.build(**sizes, kv_heads=2, unroll=True, remat=False)
    fn = sliced(step, token_slices=2)
    fn.plan(*args).save(tmp_path / "plan.json")
    assert_same(autopar.parallelize(step, plan=tmp_path / "plan.json"), step, args)


@pytest.mark.slow
def test_what_is_asked_for_is_checked():
    step, args = gpt.build(abstract=True, **SMALL)
    with pytest.raises(AutoparError, match="token_slices='some' are no slices"):
        autopar.parallelize(step, token_slices="some")
    with pytest.raises(SliceError, match="pass through a pipeline"):
        autopar.parallelize(step, token_slices=2, num_stages=1)
    with pytest.raises(SliceError, match="neither recomputed"):
        autopar.parallelize(step, token_slices=2, remat="full")
    with pytest.raises(ScheduleError, match="2bw takes no slices of tokens"):
        autopar.parallelize(step, token_slices=2, schedule="2bw")
    with pytest.raises(SliceError, match="are not a sequence of 6"):
        sliced(step, token_slices=(4, 4)).plan(*args)
    with pytest.raises(SliceError, match="cannot be cut into 7 slices"):
        sliced(step, token_slices=7).plan(*args)


def test_layers_in_a_loop_are_refused_with_the_line():
    step, args = gpt.build(abstract=True, **{**SMALL, "scan": True, "remat": True})
    with pytest.raises(SliceError, match=r"at: \S+\.py:[0-9]+"):
        sliced(step, token_slices=2).plan(*args)
