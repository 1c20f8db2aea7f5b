"""Pipelines in slices of tokens on Ray: values those of one device, workers lost or not."""

from __future__ import annotations

import os
import signal

import jax
import pytest

import autopar
from examples import gpt
from tests.runtime_ray.pipelines import furthest, numbers

pytest.importorskip("flatbuffers")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_slices_on_two_workers() -> None:
    with jax.enable_x64(True), autopar.Cluster.ray(workers=2, devices_per_worker=1, recover=True) as cluster:
        sizes = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 16, "seq": 6, "batch": 4}
        fn, (state, batch) = gpt.build(dtype="float64", clip=None, **sizes)
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, token_slices=(3, 2, 1))
        compiled = step.compile(state, batch)
        assert compiled.plan.content.pipeline.slice_lengths == (3, 2, 1)
        mine, want = step.shard(state, batch)[0], state
        for n in range(3):
            if n == 1:  # what a worker that is lost had is made again
                os.kill(cluster.processes[0], signal.SIGKILL)
            mine, metrics = compiled(mine, batch)
            want, expected = jax.jit(fn)(want, batch)
        got = jax.tree.leaves((mine, metrics))
        assert furthest(got, [numbers(x) for x in jax.tree.leaves((want, expected))]) < 1e-9
