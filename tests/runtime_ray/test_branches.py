"""Branches side by side on Ray: a worker each, values those of one device."""

from __future__ import annotations

import os
import signal

import jax
import pytest

import autopar
from tests.end_to_end.towers import Towers
from tests.runtime_ray.pipelines import furthest, numbers

pytest.importorskip("flatbuffers")


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
        assert len({s.devices for s in compiled.plan.stages}) == workers
        mine, want = step.shard(state, batch)[0], state
        for n in range(3):
            if n == 1:  # what a worker that is lost had is made again
                os.kill(cluster.processes[0], signal.SIGKILL)
            mine, metrics = compiled(mine, batch)
            want, expected = jax.jit(fn)(want, batch)
        got = jax.tree.leaves((mine, metrics))
        assert furthest(got, [numbers(x) for x in jax.tree.leaves((want, expected))]) < 1e-9
