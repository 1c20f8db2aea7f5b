"""Pipelines on clusters of so many nodes that a stage is whole nodes: pairs of stages and microbatches are ranked."""

from __future__ import annotations

import pytest

import autopar
from examples import llama


def planned(layers, nodes, **options):
    """A plan of 256 devices and more."""
    sizes = {"layers": layers, "hidden": 1024, "ffn": 2048, "heads": 16, "kv_heads": 16, "vocab": 512, "seq": 512}
    step, args = llama.build("tiny", abstract=True, batch=64, remat=True, **sizes)
    cluster = autopar.Cluster.load("dgx-h100", nodes=nodes)
    return autopar.parallelize(step, cluster=cluster, donate_argnums=0, **{"schedule": "1f1b", **options}).plan(*args)


@pytest.mark.slow
def test_the_ranked_pair_is_as_fast_as_those_that_are_named():
    free = planned(16, 32)
    named = [planned(16, 32, num_stages=s, num_microbatches=m).step_time for s, m in ((2, 8), (4, 16), (8, 32), (8, 8))]
    assert free.step_time <= 1.05 * min(named)


@pytest.mark.slow
def test_a_number_of_microbatches_that_is_given_is_taken():
    plan = planned(16, 32, num_microbatches=8)
    assert (plan.num_microbatches, plan.num_stages > 1) == (8, True)


@pytest.mark.slow
def test_interleaved_stages_that_hide_what_they_send_are_found():
    """In four microbatches a stage none of these pipelines is as fast as one stage, and in one a stage they are."""
    free = planned(32, 32, schedule="auto")
    schedule = autopar.schedule.get("interleaved", chunks=4)
    named = [planned(32, 32, schedule=schedule, num_stages=16, num_microbatches=4), planned(32, 32, num_stages=1)]
    assert free.step_time <= 1.01 * min(plan.step_time for plan in named)
