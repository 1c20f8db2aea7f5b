"""Numbers of microbatches in which slicings are priced, where both numbers are free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.schedule import get
from autopar.search import Job, Problem
from autopar.search.pipeline import profiling
from autopar.search.pipeline.candidates import layers_of
from autopar.search.pipeline.partition import Submesh
from autopar.search.pipeline.profiling import LayerProfiler
from autopar.search.pipeline.search_space import microbatches_and_stages
from autopar.search.policy import SearchPolicy, SizePolicy
from examples import mlp

SIZES: dict[str, Any] = {"layers": 8, "hidden": 256, "batch": 64}


def nodes(memory: int = 10**9) -> Cluster:
    """Two nodes of four, with slow links between them."""
    device = Device("toy", memory, 1e12, (("f32", 2e9),))
    return Cluster("toy", (NodeGroup(2, 4, device, LinkSpec(1e11, 1e-7), LinkSpec(1e7, 1e-7)),))


def problem(memory: int = 10**9) -> Problem:
    fn, args = mlp.build(abstract=True, **SIZES)
    traced = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0])
    cluster = nodes(memory)
    job = Job(num_stages=None, num_microbatches=None, memory_limit_bytes=memory)
    policy = SearchPolicy(sizes=SizePolicy(few_operators=0))  # of few operators all pairs are planned
    source = TracedStages(step_of(traced))
    return Problem(traced.graph, cluster, CostModel(cluster), job=job, source=source, policy=policy)


def prices(made: Problem, count: int) -> LayerProfiler:
    assert made.source is not None
    return LayerProfiler(made, made.source, count, layers_of(made, made.source, count, 2, None))


def counts(made: Problem, *, every: bool = False) -> list[int]:
    return [count for count, _ in microbatches_and_stages(made, get("1f1b"), every=every)]


def test_a_step_of_many_operators_is_sliced_in_the_microbatches_that_are_expected_to_be_the_fastest() -> None:
    free = problem()
    made = replace(free, subproblem=replace(free.subproblem, first_count=8))
    assert counts(made) == [8]
    assert counts(made, every=True) == counts(free) == [2, 32], "where none of its slicings fits others may"
    few = replace(made, policy=SearchPolicy())
    assert set(counts(few)) > {8, 16}, "of few operators all numbers are planned"


def test_what_is_the_same_in_two_divisions_is_priced_once(monkeypatch: pytest.MonkeyPatch):
    made, priced = problem(), []
    plain = profiling._without_limit
    monkeypatch.setattr(profiling, "_without_limit", lambda p, mesh: priced.append(mesh) or plain(p, mesh))
    costs = prices(made, 2).on(Submesh(0, 4))[0]
    once = len(priced)
    again = prices(made, 2).on(Submesh(0, 4))[0]
    assert once > 0 and len(priced) == once
    assert np.array_equal(costs.loop_s, again.loop_s)
    prices(replace(made, job=replace(made.job, memory_limit_bytes=10**8)), 2).on(Submesh(0, 4))
    assert len(priced) == once, "no limit has a part in it"


@pytest.mark.slow
def test_a_plan_with_all_free_is_near_the_best_of_all_pairs():
    fn, args = mlp.build(abstract=True, **SIZES)
    free = autopar.parallelize(fn, cluster=nodes()).plan(*args)
    asked = [
        autopar.parallelize(fn, cluster=nodes(), num_stages=stages, num_microbatches=count).plan(*args).step_time
        for stages in (2, 4)
        for count in (4, 16, 64)
    ]
    assert free.step_time <= 1.01 * min(asked)
    one = autopar.parallelize(fn, cluster=nodes(), num_stages=1).plan(*args)
    assert free.num_stages > 1 and free.step_time < one.step_time


@pytest.mark.slow
def test_a_step_that_waits_for_latency_has_stages_in_one_microbatch():
    """Stages run a part of the kernels each; microbatches would start all of them more often."""
    fn, args = mlp.build("small", abstract=True, layers=24, batch=8)
    cluster = autopar.Cluster.load("dgx-a800", nodes=1)
    free = autopar.parallelize(fn, cluster=cluster, donate_argnums=0).plan(*args)
    asked = [
        autopar.parallelize(fn, cluster=cluster, donate_argnums=0, num_stages=stages, num_microbatches=count)
        for stages, count in ((4, 1), (8, 1), (2, 2))
    ]
    assert free.num_stages > 1 and free.num_microbatches == 1
    assert free.step_time <= 1.01 * min(function.plan(*args).step_time for function in asked)
