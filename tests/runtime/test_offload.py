"""Programs with state in host memory: the same values, the state where the plan says."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from autopar import Cluster, Plan, parallelize, verify
from autopar.errors import PlanMismatchError
from autopar.lower.hosted import PINNED_HOST, check_host_memory
from autopar.schedule import Offload
from examples import gpt, mlp
from tests.runtime.observing import observed

OPTIONS = {"num_stages": 1, "num_microbatches": 1, "remat": "none", "mesh_shape": (8,), "donate_argnums": 0}


def local():
    """The devices of this process, with a link to their host as a cluster file would give it."""
    cluster = Cluster.local()
    (group,) = cluster.groups
    return dataclasses.replace(cluster, groups=(dataclasses.replace(group, host_bandwidth=25e9),))


def moved(plan, places):
    """The plan with these inputs in host memory, and no others."""
    inputs = tuple(
        msgspec.structs.replace(i, memory="host" if i.path in places else "device") for i in plan.content.inputs
    )
    return Plan(msgspec.structs.replace(plan.content, inputs=inputs))


def fresh(args):
    return jax.tree.map(np.array, args)


def steps(fn, args, count=3):
    state, batch = fresh(args)
    for _ in range(count):
        state, out = fn(state, batch)
    return state, out


def kinds(state):
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in flat}


@pytest.mark.slow
def test_under_a_limit_adam_is_the_same_with_its_moments_in_host_memory(x64):
    step, args = mlp.build("tiny", optimizer="adam", dtype="float64")
    wide = parallelize(step, cluster=local(), **OPTIONS).plan(*args)
    limit = int(wide.peak_memory * 0.95)
    fn = parallelize(step, cluster=local(), memory_limit=limit, offload="auto", **OPTIONS)
    compiled = fn.compile(*args)
    there = {i.path for i in compiled.plan.content.inputs if i.memory == "host"}
    assert there
    assert compiled.local.footprint_bytes <= limit * 1.1
    found = steps(fn, args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(steps(jax.jit(step), args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    on_host = {path for path, kind in kinds(found[0]).items() if kind == PINNED_HOST}
    assert on_host == {path.removeprefix("state") for path in there}
    assert kinds(fn.init(lambda: jax.tree.map(jnp.asarray, fresh(args)[0]))) == kinds(found[0])
    assert kinds(fn.shard(*fresh(args))[0]) == kinds(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("donated", [0, ()])
def test_where_state_lies_changes_no_bit(x64, donated):
    step, args = gpt.build("tiny", layers=1, dtype="float64")
    options = {**OPTIONS, "donate_argnums": donated}
    plan = parallelize(step, cluster=local(), **options).plan(*args)
    state = {i.path for i in plan.content.inputs if "kernel" in i.path and (".mu" in i.path or ".nu" in i.path)}
    assert len(state) >= 8
    device, host = (
        steps(parallelize(step, plan=moved(plan, places), donate_argnums=donated), args) for places in (set(), state)
    )
    assert sum(kind == PINNED_HOST for kind in kinds(host[0]).values()) == len(state)
    assert PINNED_HOST not in kinds(device[0]).values()
    for a, b in zip(jax.tree.leaves(device), jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("microbatches", "remat"), [(2, "none"), (1, "full")])
def test_in_microbatches_and_with_recomputation_too(x64, microbatches, remat):
    step, args = mlp.build("tiny", optimizer="adam", dtype="float64")
    options = {**OPTIONS, "num_microbatches": microbatches, "remat": remat}
    plan = parallelize(step, cluster=local(), **options).plan(*args)
    state = {i.path for i in plan.content.inputs if i.path.endswith("['w']") and ("mu" in i.path or "nu" in i.path)}
    assert state
    device, host = (
        steps(parallelize(step, plan=moved(plan, places), donate_argnums=0), args) for places in (set(), state)
    )
    assert sum(kind == PINNED_HOST for kind in kinds(host[0]).values()) == len(state)
    for a, b in zip(jax.tree.leaves(device), jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_array_may_be_given_for_several_leaves_in_host_memory():
    def step(state, x):
        w, m, n = state
        g = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        m, n = 0.9 * m + g, 0.8 * n + g
        return (w - 0.1 * m - 0.1 * n, m, n), jnp.sum(x @ w)

    x = jnp.arange(64.0).reshape(8, 8) / 64
    w, zeros = jnp.ones((8, 8)), jnp.zeros((8, 8))
    want, _ = step((w, zeros, zeros), x)
    plan = parallelize(step, cluster=local(), **OPTIONS).plan((w, zeros, zeros), x)
    places = {"state[1]", "state[2]"}
    fn = parallelize(step, plan=moved(plan, places), donate_argnums=0)
    found, _ = fn((w, zeros, zeros), x)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [a.sharding.memory_kind for a in found] == ["device", PINNED_HOST, PINNED_HOST]


def test_devices_without_access_to_the_memory_of_their_host_are_refused():
    step, args = mlp.build("tiny")
    plan = parallelize(step, cluster=local(), **OPTIONS).plan(*args)
    state = {i.path for i in plan.content.inputs if i.role == "optimizer"}
    bare = SimpleNamespace(device_kind="bare", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    check_host_memory(plan.content, [bare])
    with pytest.raises(PlanMismatchError, match="bare has no pinned_host") as caught:
        check_host_memory(moved(plan, state).content, [bare])
    assert caught.value.remedy == "plan with offload='none'"


@pytest.mark.slow
def test_compiled_for_a_target_what_lies_in_host_memory_is_not_the_devices():
    step, args = mlp.build("tiny", abstract=True, optimizer="adam")
    wide = parallelize(step, cluster=local(), **OPTIONS).plan(*args)
    limit = int(wide.peak_memory * 0.95)
    plan = parallelize(step, cluster=local(), memory_limit=limit, offload="auto", **OPTIONS).plan(*args)
    (stage,) = plan.stages
    assert stage.host_bytes
    compared = verify(plan, step, *args, target="cpu")
    assert compared.collectives_ok
    assert compared.compiled_memory.host == stage.host_bytes


def test_stages_of_a_pipeline_have_their_moments_in_host_memory(x64):
    step, args = mlp.build("tiny", optimizer="adam", dtype="float64")
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", "remat": "none", "donate_argnums": 0}
    wide = parallelize(step, cluster=local(), **options).plan(*args)
    limit = int(wide.peak_memory * 0.7)
    fn = parallelize(step, cluster=local(), memory_limit=limit, offload="auto", **options)
    plan = fn.plan(*args)
    there = {i.path for i in plan.content.inputs if i.memory == "host"}
    assert there and plan.num_stages == 2
    assert plan.peak_memory <= limit
    assert Plan.from_json(plan.to_json()) == plan
    again = parallelize(step, plan=plan, donate_argnums=0)
    found = steps(again, args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(steps(jax.jit(step), args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    on_host = {path for path, kind in kinds(found[0]).items() if kind == PINNED_HOST}
    assert on_host == {path.removeprefix("state") for path in there}
    assert kinds(again.shard(*fresh(args))[0]) == kinds(found[0])


@pytest.fixture(scope="module")
def in_stages():
    """A step, its arguments, how it is put into four stages, and a plan that needs no host memory."""
    with jax.enable_x64(True):
        step, args = mlp.build("tiny", layers=8, batch=512, dtype="float64")
        options = {"num_stages": 4, "num_microbatches": 8, "schedule": "1f1b", "remat": "none", "donate_argnums": 0}
        return step, args, options, parallelize(step, cluster=local(), **options).plan(*args)


def test_microbatches_of_a_pipeline_wait_in_host_memory(x64, in_stages):
    step, args, options, wide = in_stages
    limit = int(wide.peak_memory * 0.8)
    plan = parallelize(step, cluster=local(), memory_limit=limit, offload="auto", **options).plan(*args)
    unauthenticated = [n for n, s in enumerate(plan.stages) if s.form.activations_offloaded]
    assert unauthenticated
    stages = tuple(
        msgspec.structs.replace(s, form=msgspec.structs.replace(s.form, activations_offloaded=False))
        for s in plan.stages
    )
    stay = Plan(msgspec.structs.replace(plan.content, stages=stages))
    moved, kept = (parallelize(step, plan=p, donate_argnums=0) for p in (plan, stay))
    found = jax.tree.leaves(steps(moved, args))
    for a, b in zip(found, jax.tree.leaves(steps(kept, args)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(found, jax.tree.leaves(steps(jax.jit(step), args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    with_moves, without = (f.compile(*fresh(args)).local for f in (moved, kept))
    lists = with_moves.lowered.instructions.workers
    assert [any(isinstance(i, Offload) for i in w.instructions) for w in lists] == [
        n in unauthenticated for n in range(4)
    ]
    for n in unauthenticated:
        assert with_moves.worker_memory[n].total < without.worker_memory[n].total


def test_a_buffer_that_waits_is_in_host_memory(x64, in_stages):
    step, args, _, plan = in_stages
    stages = tuple(
        msgspec.structs.replace(s, form=msgspec.structs.replace(s.form, activations_offloaded=True))
        for s in plan.stages
    )
    local_program = (
        parallelize(step, plan=Plan(msgspec.structs.replace(plan.content, stages=stages))).compile(*fresh(args)).local
    )
    seen: set[str] = set()

    def observe(worker, arrays):
        if worker == 0:
            seen.update(a.sharding.memory_kind for b, a in arrays[0].items() if b.value.startswith("activation/"))

    observed(local_program, jax.tree.leaves(fresh(args)), observe)
    assert seen == {"device", PINNED_HOST}
