"""Stacks of layers in host memory: fetched a layer at a time, the same values, memory that does not grow with depth."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Cluster, Plan, parallelize, verify
from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout
from autopar.ir.phases import phase_of
from autopar.lower.aot import parse_target
from autopar.lower.hosted import PINNED_HOST
from autopar.lower.layer_techniques import updated_by_layer
from autopar.plan.words import plan_words
from tests.end_to_end.stacked import build
from tests.microbatch.running import run, traced

OPTIONS = {"num_stages": 1, "num_microbatches": 1, "remat": "none", "donate_argnums": 0}


def with_hosts(cluster, bandwidth=25e9):
    """The cluster with links to its hosts, as a cluster file would give them."""
    (group,) = cluster.groups
    return dataclasses.replace(cluster, groups=(dataclasses.replace(group, host_bandwidth=bandwidth),))


def verified_at_depths(depths, target, *, microbatches=1, **sizes):
    """What the target's compiler says of plans with layers on hosts, by number of layers."""
    pytest.importorskip("libtpu")
    cluster = with_hosts(parse_target(target).cluster())
    step, _ = build(2, microbatches=microbatches)
    verified = []
    for layers in depths:
        args = jax.eval_shape(lambda n=layers: build(n, **sizes)[1])
        plan = parallelize(step, cluster=cluster, offload="layers", **OPTIONS).plan(*args)
        verified.append(verify(plan, step, *args, target=target))
    return verified


def on_host(plan: Plan) -> set[str]:
    return {i.path for i in plan.content.inputs if i.memory == "host"}


def trained(fn, args, count=3):
    state, batch = jax.tree.map(np.array, args)
    for _ in range(count):
        state, out = fn(state, batch)
    return state, out


@pytest.mark.few(1)
@pytest.mark.parametrize(("mesh", "norm"), [((8,), None), ((2, 4), 0.5)])
def test_values_are_those_of_the_plain_step(x64, mesh, norm):
    step, args = build(4, dtype=jnp.float64, norm=norm)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=mesh, offload="layers", **OPTIONS)
    found, wanted = trained(fn, args), trained(jax.jit(step), args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    (params, first, second, _), _ = found
    for tree in (params, first, second):
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree["layers"])} == {PINNED_HOST}
        assert tree["in"].sharding.memory_kind == "device"


@pytest.mark.slow
def test_memory_of_the_device_does_not_depend_on_depth():
    cluster = with_hosts(Cluster.load("dgx-a100"))
    plans = {}
    for layers in (12, 24, 96):
        step, args = build(layers)
        plans[layers] = parallelize(step, cluster=cluster, offload="layers", **OPTIONS).plan(*args)
    shallow, deep = plans[12], plans[96]
    assert shallow.peak_memory == plans[24].peak_memory == deep.peak_memory
    assert deep.stages[0].host_bytes == 8 * shallow.stages[0].host_bytes
    assert len(on_host(deep)) == 6
    plain = {n: parallelize(build(n)[0], cluster=cluster, **OPTIONS).plan(*build(n)[1]) for n in (12, 96)}
    assert plain[96].peak_memory > 4 * plain[12].peak_memory


@pytest.mark.parametrize(("devices", "slices"), [(1, (9, 11)), (2, (22, 24))])
def test_slices_on_the_way_are_in_the_memory(devices, slices):
    """Programs for several devices fetch a layer ahead: two slices of parameters, moments and gradients of two stacks
    arrive each, one of what replaces six leaves is made. A program for one device fetches them in their own trip:
    three of a parameter's state that stay until it is updated, its gradient or update, three that replace those, and
    the three of the parameter before, whose trip has not ended."""
    step, args = build(12, width=64, batch=2)
    options = {**OPTIONS, "mesh_shape": (devices,)}
    cluster = one_device(25e9) if devices == 1 else two_devices(25e9)
    plan = parallelize(step, cluster=cluster, offload="layers", **options).plan(*args)
    stacks = {i.path: Layout.parse(i.layout) for i in plan.content.inputs if "layers" in i.path}
    split = 1 if all(k.is_replicated for k in stacks.values()) else devices
    slice_bytes, rest = 64 * 256 * 4 / split, plan.stages[0].memory
    held = rest.total - rest.parameters - rest.optimizer - rest.batch
    assert slices[0] <= held / slice_bytes <= slices[1]
    assert plan.stages[0].form.slices_ahead == int(devices > 1)
    text = "one ahead" if devices > 1 else "one by one"
    assert f"layers fetched {text}" in str(plan)
    assert f"layers fetched from host memory {text}" in plan_words(plan.content)
    assert json.loads(plan.to_json())["plan"]["stages"][0]["form"]["slices_ahead"] == int(devices > 1)


def test_a_global_norm_is_added_up_layer_by_layer():
    """Gradients of stacks go to the host in the backward pass, and come twice: for the norm, and for the update."""
    bandwidth = 1e6
    plans = {}
    for layers, norm in ((12, None), (12, 0.5), (48, 0.5)):
        step, args = build(layers, norm=norm)
        cluster = one_device(bandwidth, launch_s=0.0)
        plans[layers, norm] = parallelize(step, cluster=cluster, offload="layers", **OPTIONS).plan(*args)
    free, clipped, deep = plans.values()
    assert not clipped.content.notes
    assert clipped.peak_memory == deep.peak_memory < 1.05 * free.peak_memory
    gradients = 2 * 12 * 16 * 64 * 4
    assert clipped.stages[0].host_time - free.stages[0].host_time == pytest.approx(gradients / bandwidth)
    assert clipped.stages[0].host_bytes == free.stages[0].host_bytes


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, 0.5])
def test_a_faster_form_that_keeps_stacks_on_devices_is_no_answer(norm):
    """Recomputation and microbatches that are free: forms that hold stacks whole are faster, as nothing is moved."""
    free = {"num_stages": 1, "donate_argnums": 0, "offload": "layers"}
    plans = {}
    for layers in (12, 48):
        step, args = build(layers, norm=norm)
        plans[layers] = parallelize(step, cluster=one_device(1e6, launch_s=0.0), **free).plan(*args)
    assert plans[12].peak_memory == plans[48].peak_memory
    assert len(on_host(plans[12])) == 6


def test_stacks_that_recomputation_keeps_on_devices_are_in_a_note():
    step, args = build(12)
    options = {**OPTIONS, "remat": "full", "offload": "layers"}
    plan = parallelize(step, cluster=one_device(25e9), **options).plan(*args)
    kept = 2 * 12 * 16 * 64 * 4
    assert on_host(plan) == {path for path in on_host(plan) if not path.startswith("state[0]")}
    assert any(n.startswith(f"{kept / 1e3:.1f} kB of stacks of layers stay on the devices") for n in plan.content.notes)


def test_gradients_that_an_update_reads_whole_are_said_to_stay():
    cluster, layers = one_device(25e9), 12
    step, args = build(layers)

    def reporting(state, x):
        (params, first, second, count), out = step(state, x)
        return (params, first, second, count), {**out, "largest": jnp.max(jnp.abs(first["layers"]["up"]))}

    plans = [parallelize(s, cluster=cluster, offload="layers", **OPTIONS).plan(*args) for s in (step, reporting)]
    assert not plans[0].content.notes
    (note,) = plans[1].content.notes
    assert note.startswith("49.2 kB of gradients of stacks stay on the devices")
    assert plans[1].peak_memory > plans[0].peak_memory + layers * 16 * 64 * 4


@pytest.mark.slow
def test_compiled_memory_of_a_tpu_is_as_predicted_at_any_depth():
    verified = verified_at_depths((12, 24, 48, 96), "tpu:v5e:2x2", width=1024, batch=64)
    assert max(v.predicted_memory.total for v in verified) == min(v.predicted_memory.total for v in verified)
    compiled = [v.compiled_memory.total for v in verified]
    assert max(compiled) <= 1.01 * min(compiled)
    assert all(0.95 < v.memory_ratio < 1.05 for v in verified)


@pytest.mark.slow
def test_compiled_memory_of_one_tpu_is_as_predicted():
    (verification,) = verified_at_depths((12,), "tpu:v6e:1x1", width=1024, batch=64)
    assert 1.0 <= verification.memory_ratio < 1.15


def one_device(bandwidth, **device):
    """A cluster of one device whose host's link has ``bandwidth`` bytes/s."""
    cluster = with_hosts(Cluster.load("dgx-a100"), bandwidth)
    (group,) = cluster.groups
    changed = dataclasses.replace(group.device, **device)
    return dataclasses.replace(cluster, groups=(dataclasses.replace(group, devices_per_node=1, device=changed),))


def two_devices(bandwidth):
    """`one_device` twice, whose launches take no time."""
    (group,) = one_device(bandwidth, launch_s=0.0).groups
    return Cluster("two", (dataclasses.replace(group, count=1, devices_per_node=2),))


@pytest.mark.slow
def test_auto_takes_it_where_nothing_else_fits():
    cluster = one_device(25e9)
    step, args = build(32)
    wide = parallelize(step, cluster=cluster, offload="auto", **OPTIONS).plan(*args)
    assert not on_host(wide) and not wide.stages[0].form.layered_update
    limit = wide.peak_memory // 5
    with pytest.raises(InfeasiblePlanError):
        parallelize(step, cluster=cluster, memory_limit=limit, **OPTIONS).plan(*args)
    plan = parallelize(step, cluster=cluster, memory_limit=limit, offload="auto", **OPTIONS).plan(*args)
    assert plan.peak_memory <= limit
    assert {"state[0]['layers']['up']", "state[0]['layers']['down']"} <= on_host(plan)
    assert plan.stages[0].form.layered_update
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_each_pass_of_a_loop_is_a_move():
    layers, bandwidth = 6, 1e6
    step, args = build(layers)
    plan = parallelize(step, cluster=one_device(bandwidth, launch_s=0.0), offload="layers", **OPTIONS).plan(*args)
    stack = 2 * layers * 16 * 64 * 4  # bytes of "up" and "down"
    checkpoints = layers * 8 * 16 * 4
    moves = stack * (3 + 1) + 2 * stack * (1 + 1) + stack * (1 + 1) + checkpoints * (1 + 1)
    assert plan.stages[0].host_time == pytest.approx(moves / bandwidth)
    assert plan.stages[0].host_bytes == stack * 4 + checkpoints
    assert plan.step_time == pytest.approx(plan.search.objective)


@pytest.mark.slow
def test_a_saved_plan_runs_as_it_was_made(x64):
    step, args = build(4, dtype=jnp.float64)
    fn = parallelize(step, cluster=with_hosts(Cluster.local()), mesh_shape=(8,), offload="layers", **OPTIONS)
    plan = Plan.from_json(fn.plan(*args).to_json())
    loops = [r for r in plan.content.operators if r.host_results]
    assert len(loops) == 3  # forward pass, backward pass, update
    found = trained(parallelize(step, plan=plan, donate_argnums=0), args, count=1)
    wanted = trained(jax.jit(step), args, count=1)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_what_mixes_layers_or_is_returned_as_well_is_computed_whole():
    step, args = build(4, norm=0.5)

    def reporting(state, x):
        state, out = step(state, x)
        return state, {**out, "doubled": 2 * state[0]["layers"]["up"]}

    plain, leaves = traced(reporting, args)
    layered = updated_by_layer(plain)
    loops = [op for op in layered.graph.operators if op.primitive == "scan" and phase_of(op) != "backward"]
    assert len(loops) == 3  # forward pass, norm, update
    for a, b in zip(run(layered, leaves), jax.tree.leaves(jax.jit(reporting)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    whole = {o for op in layered.graph.operators if op.primitive != "scan" for o in op.reads}
    assert "state[0]['layers']['up']" in whole and "state[0]['layers']['down']" not in whole
    flat, _ = traced(jnp.tanh, (jnp.zeros((4, 3)),))
    assert updated_by_layer(flat) is flat


def two_stages(**more):
    """Options of a pipeline of two stages on this process's devices."""
    return {**OPTIONS, "num_stages": 2, "num_microbatches": 2, "cluster": with_hosts(Cluster.local()), **more}


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", [None, 0.5])
def test_stages_take_their_layers_from_hosts(x64, norm):
    """Passes take slices, the update is the hosts'; on the devices there are gradients and activations."""
    step, args = build(8, dtype=jnp.float64, norm=norm)
    fn = parallelize(step, offload="layers", **two_stages())
    plan = fn.plan(*args)
    assert {path for path in on_host(plan) if "layers" in path} == {
        f"state[{n}]['layers']['{name}']" for n in range(3) for name in ("up", "down")
    }
    found, wanted = trained(fn, args), trained(jax.jit(step), args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    for tree in found[0][:3]:
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree["layers"])} == {PINNED_HOST}
    loaded = fn.compile(*jax.tree.map(np.array, args)).local.loaded
    for (_, work), program in loaded.items():
        here = [p for p in program.program.reads if "['layers']" in p.name and p.ref.kind == "in" and not p.host]
        assert not here, work
    saved = parallelize(step, plan=Plan.from_json(plan.to_json()), donate_argnums=0)
    for a, b in zip(jax.tree.leaves(trained(saved, args)), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_of_stages_holds_no_more_than_gradients_of_all_layers():
    """Depth adds gradients, sums over microbatches, and checkpoints: no parameters and no moments."""
    needed = {}
    for layers in (8, 16):
        step, args = build(layers, width=32)
        options = two_stages(cluster=two_devices(25e9))
        plain, there = (parallelize(step, offload=offload, **options).plan(*args) for offload in ("none", "layers"))
        assert plain.num_stages == there.num_stages == 2
        needed[layers] = plain.stages[0].memory.total, there.stages[0].memory.total
        stack = layers // 2 * 32 * 128 * 4 * 2
        assert there.stages[0].host_bytes >= 3 * stack // 4
    plain, there = (deep - shallow for shallow, deep in zip(*needed.values(), strict=True))
    assert 0 < there < plain / 2


def test_each_microbatch_takes_slices_once_a_pass():
    layers, bandwidth, count = 8, 1e6, 4
    step, args = build(layers)
    options = two_stages(num_microbatches=count, cluster=two_devices(bandwidth))
    plan = parallelize(step, offload="layers", **options).plan(*args)
    stack = 2 * layers // 2 * 16 * 64 * 4  # bytes of "up" and "down" of a stage
    # Each pass takes parameters once a microbatch; gradients go down once.
    assert plan.stages[1].host_time == pytest.approx((2 * count + 1) * stack / bandwidth, rel=0.02)
    times = dict(plan.stages[1].work_times)
    assert times["forward"] == pytest.approx(count * stack / bandwidth, rel=0.02)
