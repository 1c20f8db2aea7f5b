"""State in the memory of workers' hosts, updated there: where it lies, and the values of one device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import autopar
from autopar import Cluster, Plan
from autopar.errors import PlanMismatchError
from autopar.lower.hosted import PINNED_HOST
from autopar.lower.pipeline.exported import ExportedProgram, PlacedPort
from autopar.runtime.ray.loaded import load_programs
from autopar.schedule import Offload, Work
from examples import mlp
from tests.end_to_end import stacked
from tests.runtime_ray.pipelines import furthest, numbers, thread_cluster

pytest.importorskip("flatbuffers")

OPTIONS = {"num_microbatches": 2, "schedule": "1f1b", "remat": "none", "donate_argnums": 0}


def threads(**run):
    """Two workers of two devices each, threads of this process, with links to their host."""
    group = dataclasses.replace(Cluster.load("local-cpu").groups[0], host_bandwidth=25e9)
    return thread_cluster(2, 2, like=group, **run)


def trained(step, args, count=3):
    state, batch = jax.tree.map(np.array, args)
    for _ in range(count):
        state, out = step(state, batch)
    return state, out


def there(plan):
    return {i.path for i in plan.content.inputs if i.memory == "host"}


def kinds(compiled, state):
    """Memory kinds of the arrays of a state, on the worker that has them."""
    hosts = compiled.local.runtime.driver.session.worker_group._hosts
    arrays = {id: a for host in hosts for id, a in host._arrays._arrays.items()}
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {"state" + jax.tree_util.keystr(path): arrays[leaf.id].sharding.memory_kind for path, leaf in flat}


@pytest.mark.parametrize("offload", ["update", pytest.param("auto", marks=pytest.mark.slow)])
def test_state_lies_on_the_hosts_of_workers(x64, offload):
    fn, args = mlp.build("tiny", optimizer="adam", dtype="float64")
    with threads() as cluster:
        limit = None
        if offload == "auto":
            limit = int(0.5 * autopar.parallelize(fn, cluster=cluster, **OPTIONS).plan(*args).peak_memory)
        step = autopar.parallelize(fn, cluster=cluster, offload=offload, memory_limit=limit, **OPTIONS)
        compiled = step.compile(*args)
        found, wanted = trained(compiled, args), trained(jax.jit(fn), args)
        assert furthest(jax.tree.leaves(found), [numbers(x) for x in jax.tree.leaves(wanted)]) < 1e-11
        assert there(compiled.plan)
        lies = kinds(compiled, found[0])
        assert {path for path, kind in lies.items() if kind == PINNED_HOST} == there(compiled.plan)
        sharded = kinds(compiled, step.shard(*args)[0])
        assert sharded == lies
    if offload == "update":
        assert all(any(o.on_host for o in part.operators) for part in compiled.plan.content.parts)


def test_microbatches_wait_on_the_hosts_of_workers(x64):
    fn, args = mlp.build("tiny", layers=8, batch=512, dtype="float64")
    group = dataclasses.replace(Cluster.load("local-cpu").groups[0], host_bandwidth=25e9)
    options = {**OPTIONS, "num_microbatches": 8}
    with thread_cluster(4, 2, like=group) as cluster:
        plan = autopar.parallelize(fn, cluster=cluster, **options).plan(*args)
        stages = tuple(
            msgspec.structs.replace(s, form=msgspec.structs.replace(s.form, activations_offloaded=True))
            for s in plan.stages
        )
        waiting = Plan(msgspec.structs.replace(plan.content, stages=stages))
        compiled = autopar.parallelize(fn, cluster=cluster, plan=waiting, donate_argnums=0).compile(*args)
        workers = compiled.local.runtime.source.program.workers
        assert any(isinstance(i, Offload) for w in workers for i in w.instructions)
        found, wanted = trained(compiled, args), trained(jax.jit(fn), args)
        assert furthest(jax.tree.leaves(found), [numbers(x) for x in jax.tree.leaves(wanted)]) < 1e-11


def test_devices_without_access_to_their_host_are_refused():
    port = PlacedPort("in/state@0", ((),), host=True)
    program = ExportedProgram(Work("update", 0), (("x", 1),), (port,), (), b"")
    bare = SimpleNamespace(device_kind="bare", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    with pytest.raises(PlanMismatchError, match="state of this worker in host memory, and bare has no pinned_host"):
        load_programs([program], [bare])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_on_ray(hosts):
    """Real processes, one or two a stage: values of one device; arguments of the updates are the host's."""
    with (
        jax.enable_x64(True),
        Cluster.ray(workers=2 * hosts, devices_per_worker=2 // hosts, hosts_per_stage=hosts) as bare,
    ):
        groups = tuple(dataclasses.replace(g, host_bandwidth=25e9) for g in bare.groups)
        cluster = dataclasses.replace(bare, groups=groups)
        fn, args = mlp.build("tiny", optimizer="adam", dtype="float64")
        step = autopar.parallelize(fn, cluster=cluster, offload="update", **OPTIONS)
        compiled = step.compile(*args)
        assert there(compiled.plan)
        found, wanted = trained(compiled, args), trained(jax.jit(fn), args)
        assert furthest(jax.tree.leaves(found), [numbers(x) for x in jax.tree.leaves(wanted)]) < 1e-11
        texts = {name: text for name, (text, _) in compiled.local.runtime.compiled().items() if "update" in name}
        assert texts and all("S(5)" in text.splitlines()[0] for text in texts.values())


def test_workers_take_layers_from_their_hosts(x64):
    fn, args = stacked.build(4, dtype=jnp.float64)
    with threads() as cluster:
        compiled = autopar.parallelize(fn, cluster=cluster, offload="layers", **OPTIONS).compile(*args)
        assert {p for p in there(compiled.plan) if "layers" in p} == {
            f"state[{n}]['layers']['{name}']" for n in range(3) for name in ("up", "down")
        }
        found, wanted = trained(compiled, args), trained(jax.jit(fn), args)
        assert furthest(jax.tree.leaves(found), [numbers(x) for x in jax.tree.leaves(wanted)]) < 1e-11
        programs = compiled.local.runtime.function.exported
        read = {(p.work.kind, r.host) for p in programs for r in p.reads if r.name.startswith("in/state[0]['layers']")}
        assert read == {("forward", True), ("backward", True), ("update", True)}
