"""The schedule of a pipeline where it is free: the fastest that fits, and what it holds is what programs hold."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar import Cluster
from autopar.cluster import Device, LinkSpec, NodeGroup
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.split_layers import split_layers
from autopar.schedule import Work, get
from examples import gpt, mlp


def toy(flops: float, between: float = 1e13) -> Cluster:
    """Eight devices two a node; links inside a node cost next to nothing."""
    device = Device("toy", 10**9, 1e15, (("f32", flops),))
    return Cluster("toy", (NodeGroup(4, 2, device, LinkSpec(1e13, 0.0), LinkSpec(between, 0.0)),))


def _plan(cluster, schedule="auto", stages=4, count=8, fn_args=None, **options):
    fn, args = fn_args or mlp.build(abstract=True, layers=8, hidden=64, batch=64)
    return autopar.parallelize(
        fn, cluster=cluster, num_stages=stages, num_microbatches=count, schedule=schedule, **options
    ).plan(*args)


#: So slow that starting a program costs nothing next to it.
SLOW = toy(1e7)


@pytest.mark.slow
def test_the_fastest_schedule_is_taken():
    found = _plan(SLOW)
    one = _plan(SLOW, "1f1b")
    assert found.schedule in ("zb-h1", "zb-h2")
    assert found.step_time < one.step_time
    others = [_plan(SLOW, name) for name in ("zb-h1", "zb-h2", "eager-1f1b", "gpipe")]
    assert found.step_time <= min(p.step_time for p in others) * 1.005
    assert found.search.objective == found.step_time == autopar.simulate(found).step_time


@pytest.mark.slow
def test_what_starting_more_programs_costs_is_not_worth_it_for_a_step_of_microseconds():
    fast = toy(1e14)
    assert not _plan(fast).schedule.startswith("zb")


def test_a_schedule_that_does_not_fit_is_not_taken():
    free = _plan(SLOW)
    one = _plan(SLOW, "1f1b")
    assert one.peak_memory < free.peak_memory
    limit = (one.peak_memory + free.peak_memory) // 2
    found = _plan(SLOW, memory_limit=limit)
    assert found.peak_memory <= limit
    assert found.schedule != free.schedule or found.peak_memory < free.peak_memory


def test_two_stages_on_each_worker_are_planned_or_said_to_be_no_faster():
    plan = _plan(toy(1e7, between=3e5), stages="auto", count=4)
    rows = [row for row in plan.search.trail if row.how == "two stages on each worker"]
    assert {row.stages for row in rows} == {((4, 4),), ((8, 8),)}
    assert {row.outcome for row in rows} <= {"planned", "bounded"}
    for stages in (4, 8):
        asked = [_plan(toy(1e7, between=3e5), name, stages=stages, count=4) for name in ("zb-v", "interleaved")]
        assert plan.step_time <= min(p.step_time for p in asked)
    assert [c.note for c in plan.search.considered].count("chosen") == 1


def test_no_two_stages_a_worker_where_the_number_of_stages_was_asked_for():
    assert _plan(SLOW, count=4).num_stages == 4


@pytest.mark.slow
@pytest.mark.parametrize(("build", "options"), [(mlp.build, {}), (gpt.build, {"layers": 2})])
def test_what_waits_for_weight_gradients_is_what_programs_hand_on(build, options):
    fn, args = build(abstract=True, **options)
    step = autopar.parallelize(fn, num_stages=2, num_microbatches=4, schedule="zb-h1", mesh_shape=None)
    plan = step.plan(*args)
    traced = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0])
    flow = lower_pipeline(split_layers(traced, plan.content.stack_groups).step, plan).instructions.dataflow
    for stage, own in enumerate(plan.stages):
        backward, weight = (flow.by_work[Work(kind, stage)] for kind in ("backward", "weight"))
        handed = sum(flow.by_name[n].bytes for n in backward.writes if n in weight.reads)
        assert own.weight_stash_bytes == handed
    assert any(s.weight_stash_bytes for s in plan.stages)


def test_the_record_has_what_waits():
    plan = _plan(SLOW, "zb-h2")
    stashes = {v.name: v.bytes for v in plan.content.pipeline.values if v.name.startswith("stash@")}
    assert stashes == {f"stash@{i}": s.weight_stash_bytes for i, s in enumerate(plan.stages)}
    assert any(stashes.values())


@pytest.mark.slow
def test_a_schedule_object_and_a_name_are_taken_as_they_are():
    assert _plan(SLOW, "gpipe").schedule == "gpipe"
    assert _plan(SLOW, get("eager-1f1b")).schedule == "eager-1f1b"


@pytest.mark.slow
def test_the_chosen_schedule_gives_the_values_of_the_plain_function():
    fn, args = mlp.build(layers=8, hidden=64, batch=64)
    plan = _plan(SLOW, fn_args=(fn, args))
    assert plan.schedule.startswith("zb")
    step = autopar.parallelize(fn, plan=plan)
    expected, found = jax.jit(fn)(*args), step(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
