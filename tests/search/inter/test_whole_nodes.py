"""Pipelines on clusters of so many nodes that a stage is whole nodes: pairs of stages and microbatches are ranked."""

from __future__ import annotations

import pytest

import autopar
from autopar.search.enumeration.whole_steps import RankedPairs, _on_few_devices
from examples import llama, mlp
from tests.search.problems import problem_of


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


def test_interleaved_stages_are_planned_where_they_are_estimated_faster_by_far():
    pairs = ((10.0, 64, 256), (11.0, 32, 128))
    interleaved = ((8.9, 16, 16, 4), (9.5, 16, 64, 4))
    assert RankedPairs(pairs, interleaved).chunked(0.9) == (16, 16, 4)
    assert RankedPairs(pairs, interleaved).chunked(0.8) is None
    assert RankedPairs(pairs).chunked(0.9) is None
    assert RankedPairs((), interleaved).chunked(0.9) == (16, 16, 4)


@pytest.mark.slow
def test_interleaved_stages_that_hide_what_they_send_are_found():
    """In four microbatches a stage none of these pipelines is as fast as one stage, and in one a stage they are."""
    free = planned(32, 32, schedule="auto")
    schedule = autopar.schedule.get("interleaved", chunks=4)
    named = [planned(32, 32, schedule=schedule, num_stages=16, num_microbatches=4), planned(32, 32, num_stages=1)]
    assert free.step_time <= 1.01 * min(plan.step_time for plan in named)


def test_stages_have_few_devices_where_that_is_possible():
    fn, args = mlp.build(abstract=True)
    problem = problem_of(fn, args, autopar.Cluster.load("dgx-h100", nodes=512))
    assert _on_few_devices(problem, (2, 4, 8)) == [4, 8], "of 4,096 devices at most 1,024"
    assert _on_few_devices(problem, (2,)) == (2,)
