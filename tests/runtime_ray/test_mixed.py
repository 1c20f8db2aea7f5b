"""Clusters whose workers have different numbers of devices: pipelines of unequal stages."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import pytest

import autopar
from examples.mlp import build
from tests.runtime_ray.pipelines import FragileWorkerGroup, furthest, numbers, thread_cluster

pytest.importorskip("flatbuffers")

SIZES = {"layers": 4, "hidden": 16, "batch": 8}


def furthest_leaf(got: Any, want: Any) -> float:
    return furthest(jax.tree.leaves(got), [numbers(x) for x in jax.tree.leaves(want)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "devices"), [((1, 1), (4, 2)), pytest.param((2, 1), (1, 4), marks=pytest.mark.slow)]
)
def test_training_on_unequal_workers_is_that_of_one_device(workers: tuple[int, ...], devices: tuple[int, ...]) -> None:
    """Each worker has a stage on all of its devices, whichever number it has; state goes between two functions."""
    fn, (state, batch) = build("tiny", **SIZES)
    plain = jax.jit(fn)
    with thread_cluster(workers, devices, deadline_s=60) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        compiled = function.compile(state, batch)
        sizes = [d for n, d in zip(workers, devices, strict=True) for _ in range(n)]
        assert sorted(len(s.devices) for s in compiled.plan.stages) == sorted(sizes)
        mine, want = function.shard(state, batch)[0], state
        for _ in range(3):
            mine, metrics = compiled(mine, batch)
            want, expected = plain(want, batch)
        assert furthest_leaf((mine, metrics), (want, expected)) < 1e-5


def test_the_only_worker_of_a_kind_may_go_and_come_back() -> None:
    """A worker of 4 and one of 2 devices: the one of 4 is lost, later it is there again."""
    fn, (state, batch) = build("tiny", **SIZES)
    plain, room = jax.jit(fn), (1, 1)
    with thread_cluster((1, 1), (4, 2), lambda: room, deadline_s=60, recover=True, growth_check_s=0) as cluster:
        compiled = autopar.parallelize(fn, cluster=cluster, num_microbatches=2).compile(state, batch)
        mine, want, devices = state, state, []
        for step in range(5):
            if step == 1:
                room, group = (0, 1), cluster.worker_groups[-1]
                assert isinstance(group, FragileWorkerGroup)
                group.lose(0)
            if step == 3:
                room = (1, 1)
            mine, _ = compiled(mine, batch)
            want, _ = plain(want, batch)
            devices.append(sorted(len(s.devices) for s in compiled.local.plan.stages))
        assert devices == [[2, 4], [2], [2], [2, 4], [2, 4]]
        assert furthest_leaf(mine, want) < 1e-5


# A Ray of three nodes on this machine: two of one type and one of another, as `ray start` would join them.
ON_RAY = """
import os, jax, numpy as np, ray
from ray.cluster_utils import Cluster as Nodes
import autopar
from examples.mlp import build

nodes = Nodes()
for type, cpus in (("SMALL", 2), ("LARGE", 4), ("SMALL", 2)):
    nodes.add_node(num_cpus=cpus, resources={"accelerator_type:" + type: 1, "fast": 2}, labels={"zone": "a"})
like = {"SMALL": "local-cpu", "LARGE": "local-cpu"}
fn, (state, batch) = build("tiny", layers=4, hidden=16, batch=8)
asked = {"resources": {"fast": 0.5}, "labels": {"zone": "a"}, "runtime_env": {"env_vars": {"MINE": "there"}}}

def seen(actor):
    here = ray.get_runtime_context()
    return os.environ["MINE"], here.get_assigned_resources()["fast"], here.get_node_labels()["zone"]

with autopar.Cluster.ray(nodes.address, like=like, devices="cpu", **asked) as cluster:
    assert [(g.count, g.devices_per_node) for g in cluster.groups] == [(1, 4), (2, 2)], cluster
    step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
    want, plain = state, jax.jit(fn)
    for _ in range(3):
        state, _ = step(state, batch)
        want, _ = plain(want, batch)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    for actor in cluster.worker_groups[-1]._actors:
        assert ray.get(actor.__ray_call__.remote(seen)) == ("there", 0.5, "a")
nodes.shutdown()
print("equal")
"""


@pytest.mark.slow
def test_nodes_of_several_types_in_one_ray_train_as_one_device() -> None:
    """Two types, with 4, 2 and 2 devices: workers are on nodes of their own type; links are encrypted.

    What Ray is asked for on their behalf (variables, resources, labels) reaches them.
    """
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", ON_RAY], env={**hidden, **paths}, capture_output=True, text=True)
    assert done.stdout.endswith("equal\n"), done.stdout[-1000:] + done.stderr[-4000:]


# Two drivers on one Ray. Each has a task print; the first says what it saw of the other.
OTHER = """
import sys, time, ray
ray.init(sys.argv[1])

@ray.remote
def say(text):
    print(text, flush=True)

for _ in range(20):
    ray.get(say.remote("of another job"))
    time.sleep(0.1)
"""
MINE = """
import subprocess, sys, time, ray
from ray.cluster_utils import Cluster as Nodes
import autopar

nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 4})
with autopar.Cluster.ray(nodes.address, workers=1, devices="cpu", devices_per_worker=1) as cluster:
    subprocess.run([sys.executable, "-c", sys.argv[1], nodes.address], check=True, capture_output=True)

    @ray.remote
    def say(text):
        print(text, flush=True)

    ray.get(say.remote("of this job"))
    time.sleep(3)
nodes.shutdown()
"""


@pytest.mark.slow
def test_what_other_jobs_print_is_not_shown() -> None:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-c", MINE, OTHER]
    done = subprocess.run(command, env={**hidden, **paths}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "of this job" in shown
    assert "of another job" not in shown
