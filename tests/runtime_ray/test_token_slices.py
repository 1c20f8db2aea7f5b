"""Pipelines in slices of tokens on Ray: values those of one device, workers lost or not."""

from __future__ import annotations

import jax
import pytest

import autopar
from examples import gpt
from tests.runtime_ray.pipelines import furthest_after_a_loss

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
        assert furthest_after_a_loss(cluster, step, compiled, fn, state, batch) < 1e-9
