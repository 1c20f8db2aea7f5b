"""Machines that are lost for good: planning again for what is left. Workers are threads of this process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import ClusterError
from autopar.runtime.checkpoints import Checkpoints
from autopar.runtime.ray import RemoteArray
from tests.runtime_ray.pipelines import FragileWorkerGroup, furthest, numbers, thread_cluster

pytest.importorskip("flatbuffers")

TEXT = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "vocab": 32, "seq": 4, "batch": 8}


@pytest.mark.parametrize(
    ("name", "sizes", "left", "lost_in"),
    [
        pytest.param("mlp", {"layers": 4, "hidden": 16, "batch": 8}, 2, (1,), marks=pytest.mark.slow),
        ("mlp", {"layers": 4, "hidden": 16, "batch": 8}, 1, (3,)),
        pytest.param("llama", TEXT, 2, (1, 3), marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_with_fewer_workers(
    name: str, sizes: dict[str, Any], left: int, lost_in: tuple[int, ...]
) -> None:
    build = importlib.import_module(f"examples.{name}").build
    room = 4
    with jax.enable_x64(True):
        fn, (state, batch) = build("tiny", dtype="float64", **sizes)
        cluster = thread_cluster(4, 2, lambda: room, deadline_s=60, recover=True, copy_every=2)
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=4, schedule="1f1b")
        compiled = function.compile(state, batch)
        assert compiled.plan.num_stages == 4
        first = mine = function.shard(state, batch)[0]
        want, plain = state, jax.jit(fn)
        for step in range(5):
            if step in lost_in:
                room = left
                worker_group = cluster.worker_groups[-1]
                assert isinstance(worker_group, FragileWorkerGroup)
                worker_group.lose(step % len(cluster.worker_groups[-1]._hosts))
            mine, metrics = compiled(mine, batch)
            want, expected = plain(want, batch)
        local = compiled.local
        got = jax.tree.leaves((mine, metrics))
        assert furthest(got, [numbers(x) for x in jax.tree.leaves((want, expected))]) < 1e-9
        # What was on workers that are gone is still to be had, and another plan is what runs.
        assert furthest(jax.tree.leaves(first), [numbers(x) for x in jax.tree.leaves(state)]) == 0
        assert local.runtime.driver.recoveries == len(lost_in)
        assert local.plan.num_stages == left
        assert {d for s in local.plan.stages for d in s.devices} == set(range(2 * left))
        assert len(local.program.input_shardings) == len(compiled.plan.content.inputs)
        cluster.close()


def test_nodes_that_come_back_are_used_again() -> None:
    """Four nodes, two, and four again: training goes on, on all that there are."""
    fn, (state, batch) = importlib.import_module("examples.mlp").build("tiny", layers=4, hidden=16, batch=8)
    room = 4
    with thread_cluster(4, 1, lambda: room, deadline_s=60, recover=True, growth_check_s=0) as cluster:
        compiled = autopar.parallelize(fn, cluster=cluster, num_microbatches=4).compile(state, batch)
        mine, want, stages = state, state, []
        for step in range(5):
            if step == 1:
                room = 2
                group = cluster.worker_groups[-1]
                assert isinstance(group, FragileWorkerGroup)
                group.lose(0)
            if step == 3:
                room = 4
            mine, _ = compiled(mine, batch)
            want, _ = jax.jit(fn)(want, batch)
            stages.append(compiled.local.plan.num_stages)
        assert stages == [4, 2, 2, 4, 4]
        assert furthest(jax.tree.leaves(mine), [numbers(x) for x in jax.tree.leaves(want)]) < 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("moment", ["start", "init", "shard", "restore"])
def test_recovery_covers_what_comes_before_the_first_step(moment: str, tmp_path: Path) -> None:
    """A worker is lost while functions are loaded, state is made, arguments are placed, a checkpoint is read."""
    build = importlib.import_module("examples.mlp").build
    fn, (state, batch) = build("tiny", layers=4, hidden=16, batch=8)
    lost: list[str] = []
    methods = {"start": "load", "init": "make", "shard": "put", "restore": "read"}

    class LostOnce(FragileWorkerGroup):
        def call(self, process: int, method: str, *args: Any) -> Any:
            if method == methods[moment] and not lost:
                lost.append(method)
                self.lose(process)
            return super().call(process, method, *args)

    with thread_cluster(2, 2, deadline_s=60, recover=True, group=LostOnce) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        function.compile(state, batch)
        made = function.init(lambda: build("tiny", layers=4, hidden=16, batch=8)[1][0])
        placed = function.shard(state, batch)[0]
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(0, placed)
        placed = checkpoints.restore(placed)
        assert lost == [methods[moment]]
        assert cluster.workers.recoveries == 1
        for got in (made, placed):
            assert furthest(jax.tree.leaves(got), [numbers(x) for x in jax.tree.leaves(state)]) < 1e-5
        want = [numbers(x) for x in jax.tree.leaves(jax.jit(fn)(state, batch))]
        assert furthest(jax.tree.leaves(function(placed, batch)), want) < 1e-5


def test_no_machine_left_is_an_error() -> None:
    fn, (state, batch) = importlib.import_module("examples.mlp").build("tiny", layers=2, hidden=16, batch=8)
    room = 2
    cluster = thread_cluster(2, 1, lambda: room, deadline_s=60, recover=True, start_s=0.1)
    compiled = autopar.parallelize(fn, cluster=cluster, num_microbatches=2).compile(state, batch)
    worker_group = cluster.worker_groups[-1]
    assert isinstance(worker_group, FragileWorkerGroup)
    worker_group.lose(1)
    room = 0
    with pytest.raises(ClusterError, match=r"no machine is left(.|\n)*start_s"):
        compiled(state, batch)
    room = 1  # one that comes later is used by the next call
    got, _ = compiled(state, batch)
    want = [numbers(x) for x in jax.tree.leaves(jax.jit(fn)(state, batch)[0])]
    assert furthest(jax.tree.leaves(got), want) < 1e-5
    cluster.close()


def test_a_machine_is_waited_for_where_there_is_none() -> None:
    fn, (state, batch) = importlib.import_module("examples.mlp").build("tiny", layers=2, hidden=16, batch=8)
    rooms = iter([2, 0, 0])  # at the start, when a worker was lost, and once more
    said: list[str] = []
    with thread_cluster(2, 1, lambda: next(rooms, 2), deadline_s=60, recover=True, start_s=60) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, progress=said.append)
        mine, _ = function(state, batch)
        worker_group = cluster.worker_groups[-1]
        assert isinstance(worker_group, FragileWorkerGroup)
        worker_group.lose(1)
        mine, _ = function(mine, batch)
        assert any("no machine is there; waiting" in text for text in said)
        want = jax.jit(fn)(jax.jit(fn)(state, batch)[0], batch)[0]
        assert furthest(jax.tree.leaves(mine), [numbers(x) for x in jax.tree.leaves(want)]) < 1e-5


def test_a_checkpoint_is_that_of_any_number_of_stages(tmp_path: Path) -> None:
    fn, (state, batch) = importlib.import_module("examples.mlp").build("tiny", layers=4, hidden=16, batch=8)
    made = {}
    clusters = {workers: thread_cluster(workers, 2) for workers in (3, 2)}
    for workers, cluster in clusters.items():
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        made[workers] = function.compile(state, batch), function.shard(state, batch)[0]
    three, start = made[3]
    two, like = made[2]
    checkpoints = Checkpoints(tmp_path)
    middle, _ = three(start, batch)
    checkpoints.save(1, middle)
    there = checkpoints.restore(like)
    assert all(isinstance(x, RemoteArray) for x in jax.tree.leaves(there))
    got, _ = two(there, batch)
    want, _ = three(middle, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    for cluster in clusters.values():
        cluster.close()
