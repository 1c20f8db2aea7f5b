"""Pairs of stages and microbatches by prices between two numbers of microbatches."""

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
from autopar.lower.step import step_of
from autopar.schedule import get
from autopar.search import Job, Problem, alpa
from autopar.search.cuttable import CuttableStep
from autopar.search.enumeration import candidates, rank_pairs
from autopar.search.outcome import Bounded
from autopar.search.partition.slicings import layers_of
from autopar.search.partition.submesh import Submesh
from autopar.search.policy import SearchPolicy, SizePolicy
from autopar.search.profiling import sharding
from autopar.search.profiling.profiler import LayerProfiler
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


def pairs(made: Problem) -> list[tuple[int, int]]:
    assert made.source is not None
    fewest = {s: candidates.fewest_blocks(made, s) for s in (2, 4, 8)}
    ranked = rank_pairs.ranked_pairs(CuttableStep(made, made.source, alpa), get("1f1b"), fewest)
    assert not isinstance(ranked, Bounded)
    return ranked


def test_prices_at_both_ends_are_those_that_were_made():
    made = problem()
    few, many = prices(made, 2), prices(made, 32)
    kind = Submesh(0, 4)
    for count, own in ((2, few), (32, many)):
        between = rank_pairs.InterpolatedCosts(few, many, count)
        (costs, shape), (real, _) = between.on(kind), own.on(kind)
        assert shape == many.on(kind)[1] and between.layers.cut_bytes == own.layers.cut_bytes
        for name in ("loop_s", "once_s", "state_bytes", "activation_bytes", "temporary_bytes"):
            assert getattr(costs, name) == pytest.approx(getattr(real, name)), name
        assert set(costs.recomputed) == {"selective", "full"}
        for level, way in costs.recomputed.items():
            assert way.loop_s == pytest.approx(real.recomputed[level].loop_s)
            assert way.activation_bytes == pytest.approx(real.recomputed[level].activation_bytes)


def test_what_is_the_same_in_two_divisions_is_priced_once(monkeypatch: pytest.MonkeyPatch):
    made, priced = problem(), []
    plain = sharding._without_limit
    monkeypatch.setattr(sharding, "_without_limit", lambda p, mesh: priced.append(mesh) or plain(p, mesh))
    costs = prices(made, 2).on(Submesh(0, 4))[0]
    once = len(priced)
    again = prices(made, 2).on(Submesh(0, 4))[0]
    assert once > 0 and len(priced) == once
    assert np.array_equal(costs.loop_s, again.loop_s)
    prices(replace(made, job=replace(made.job, memory_limit_bytes=10**8)), 2).on(Submesh(0, 4))
    assert len(priced) == once, "no limit has a part in it"


def test_prices_between_are_near_those_that_would_be_made():
    made = problem()
    few, many, real = prices(made, 2), prices(made, 32), prices(made, 8)
    kind = Submesh(0, 4)
    between, own = rank_pairs.InterpolatedCosts(few, many, 8).on(kind)[0], real.on(kind)[0]
    assert between.loop_s.sum() == pytest.approx(own.loop_s.sum(), rel=0.1)
    assert between.activation_bytes.sum() == pytest.approx(own.activation_bytes.sum(), rel=0.1)
    assert np.all(between.loop_s > many.on(kind)[0].loop_s) and np.all(between.loop_s < few.on(kind)[0].loop_s)


def test_three_pairs_with_two_numbers_of_stages_are_taken():
    made = problem()
    found = pairs(made)
    assert len(found) == len(set(found)) == 3
    priced = {key.of[1] for key in made.store.answers if key.what == "layers"}
    assert priced == {1, 64}, "priced in the fewest and the most microbatches alone"
    assert len({stages for _, stages in found}) == 2
    assert all(count > 2 for count, _ in found), "few have a bubble"


@pytest.mark.slow
def test_where_memory_is_short_what_exceeds_it_least_comes_first():
    """By the prices none of the pairs fits in this memory."""
    (_, plenty), *_ = pairs(problem())
    (_, short), *_ = pairs(problem(memory=1_000_000))
    assert short < plenty
    assert pairs(problem(memory=700_000)) == [], "half as much again would not do"


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


def test_few_microbatches_leave_nothing_between():
    fn, args = mlp.build(abstract=True, layers=8, hidden=256, batch=2)
    traced = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0])
    made = replace(problem(), graph=traced.graph, source=TracedStages(step_of(traced)))
    assert pairs(made) == []
