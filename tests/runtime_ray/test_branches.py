"""Branches side by side on Ray: a worker each, values those of one device."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.lower.split_layers import split_layers
from tests.end_to_end.towers import Towers
from tests.runtime_ray.pipelines import furthest, furthest_after_a_loss, numbers, thread_cluster

pytest.importorskip("flatbuffers")


@pytest.mark.parametrize("options", [{}, {"schedule": "branches", "num_microbatches": 2}])
def test_the_search_finds_towers_for_workers(options: dict[str, Any]) -> None:
    """One worker a tower is predicted to be faster than any pipeline, and is what runs."""
    with jax.enable_x64(True), thread_cluster(2, 1, deadline_s=60) as cluster:
        fn, (state, batch) = Towers((2, 2), width=64).build()
        step = autopar.parallelize(fn, cluster=cluster, **options)
        compiled = step.compile(state, batch)
        assert "branches side by side: state[0]['tower0'] on device" in str(compiled.plan)
        mine, metrics = compiled(step.shard(state, batch)[0], batch)
        want = jax.jit(fn)(state, batch)
        got = jax.tree.leaves((mine, metrics))
        assert furthest(got, [numbers(x) for x in jax.tree.leaves(want)]) < 1e-9


def test_fewer_workers_than_branches() -> None:
    """Where a machine is lost for good, branches share the workers that are left, or a pipeline takes their place."""
    with jax.enable_x64(True), thread_cluster(2, 1, deadline_s=60) as cluster:
        fn, (state, batch) = Towers((2, 2)).build()
        step = autopar.parallelize(fn, cluster=cluster, schedule="branches", num_microbatches=1)
        pure, signature = step._plain, step.compile(state, batch).traced.signature
        traced, plan = pure.planned[signature]
        split_step = split_layers(traced, plan.content.stack_groups)
        fewer = pure._pipeline_on(cluster.fewer((1,)), traced, split_step, plan)
        assert len({s.devices for s in fewer.stages}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("towers", "workers", "microbatches"),
    [(Towers((2, 2), momentum=True), 2, 4), (Towers((3, 1), join="contrast", clip=True, trunk=1), 2, 1)],
)
def test_towers_on_workers_of_their_own(towers: Towers, workers: int, microbatches: int) -> None:
    with jax.enable_x64(True), autopar.Cluster.ray(workers=workers, devices_per_worker=1, recover=True) as cluster:
        fn, (state, batch) = towers.build()
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=microbatches, schedule="branches")
        compiled = step.compile(state, batch)
        assert compiled.plan.schedule == "branches"
        assert "side by side" in str(compiled.plan)
        assert len({s.devices for s in compiled.plan.stages}) == workers
        assert furthest_after_a_loss(cluster, step, compiled, fn, state, batch) < 1e-9
