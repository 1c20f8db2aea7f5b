"""Numbers of stages and of microbatches that are tried."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import autopar
from autopar.cost import CostModel, total_flops
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir.phases import phase_of
from autopar.lower.retrace import step_of
from autopar.lower.split_layers import split_layers
from autopar.schedule import get
from autopar.search import Problem
from autopar.search.job import Job
from autopar.search.pipeline.search_space import (
    loops_over_layers,
    may_have_one_loop,
    microbatches_and_stages,
    most_microbatches,
    stage_counts,
    stages_of_whole_nodes,
    unevenness,
)
from autopar.search.policy import SearchPolicy, SizePolicy
from examples import gpt, mlp
from tests.search.problems import toy, with_policy

FREE = Job(num_stages=None, num_microbatches=None)


def problem(nodes: int, groups: int = 1, job: Job = FREE, **sizes) -> Problem:
    build = gpt.build if "layers" in sizes else mlp.build
    fn, args = build(abstract=True, **sizes)
    traced = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0])
    graph = split_layers(traced, groups).step.graph if groups > 1 else step_of(traced).graph
    cluster = autopar.Cluster.load("dgx-a100", nodes=nodes)
    return Problem(graph, cluster, CostModel(cluster), job=job)


def test_a_large_cluster_has_stages_of_whole_nodes_with_as_many_layers_each():
    many = problem(48, groups=12, layers=12, scan=True, batch=96)
    assert loops_over_layers(many.graph) == 12
    assert stage_counts(many, get("1f1b")) == [12]
    assert list(microbatches_and_stages(many, get("1f1b"))) == [(96, [12])]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("layers", "nodes", "counts"),
    [(16, 32, [2, 4, 8, 16]), (15, 32, [2, 4, 8, 16]), (13, 32, [2]), (12, 48, [2, 3, 4, 6, 12]), (7, 25, [])],
)
def test_stages_of_whole_nodes_have_nearly_equal_shares_of_layers(layers, nodes, counts):
    """126 layers on 2,048 nodes make 16 stages of at most eight: as many layers each is not asked for."""
    assert stages_of_whole_nodes(problem(nodes, layers=layers, scan=True, batch=32)) == counts


@pytest.mark.parametrize(("stages", "uneven"), [(2, 1.0), (4, 1.0), (8, 16 / 12), (12, 1.0), (16, 16 / 12)])
def test_stages_of_a_loop_are_as_uneven_as_their_layers(stages, uneven):
    assert unevenness(problem(48, layers=12, scan=True, batch=96), stages) == pytest.approx(uneven)


@pytest.mark.parametrize(
    ("sizes", "remat", "stages", "may"),
    [
        ({}, "auto", 4, True),
        ({}, "auto", 12, True),
        ({}, "auto", 8, False),
        ({}, "full", 4, False),
        ({"vocab": 1 << 16}, "auto", 4, False),
        ({"scan": False}, "auto", 4, False),
    ],
)
def test_stages_have_one_loop_where_single_layers_would_make_none_more_even(sizes, remat, stages, may):
    """Not where their number divides no layers, the head computes more than a layer, or layers are recomputed."""
    given = {"layers": 12, "hidden": 64, "scan": True, "batch": 96, **sizes}
    assert may_have_one_loop(problem(4, job=replace(FREE, remat=remat), **given), stages) == may


@pytest.mark.slow
def test_stages_of_a_model_without_loops_are_as_uneven_as_the_best_runs_of_its_products():
    unrolled = problem(32, layers=3, hidden=64, batch=32)
    products = [op for op in unrolled.graph.operators if phase_of(op) == "forward" and op.primitive == "dot_general"]
    heavy = [total_flops(unrolled.graph, op) for op in products]
    for stages in (2, 3):
        cuts = itertools.combinations(range(1, len(heavy)), stages - 1)
        runs = ([sum(heavy[a:b]) for a, b in itertools.pairwise((0, *ends, len(heavy)))] for ends in cuts)
        assert unevenness(unrolled, stages) == pytest.approx(stages * min(map(max, runs)) / sum(heavy))
    assert unevenness(unrolled, len(heavy) + 1) == math.inf


@pytest.mark.slow
def test_stages_of_a_large_cluster_are_no_more_than_the_model_has_even_parts():
    """Of two unrolled layers 16 stages, which share 64 nodes too, would have one of 2.4 times its share."""
    few = problem(64, layers=2, batch=64)
    assert stages_of_whole_nodes(few) == [2, 4, 8]


@pytest.mark.parametrize(("limit", "count"), [(96, 96), (95, 48), (7, 6), (1, 1)])
def test_most_microbatches_divide_the_batch(limit, count):
    assert most_microbatches(problem(1, batch=96), limit) == count


def test_what_is_asked_for_is_what_is_tried():
    asked = replace(FREE, num_stages=6, num_microbatches=24)
    assert list(microbatches_and_stages(problem(48, job=asked), get("1f1b"))) == [(24, [6])]


@pytest.mark.parametrize(("nodes", "counts"), [(1, [2, 3, 4, 8]), (2, [2, 3, 4, 8, 16]), (8, [2, 3, 4, 8, 16, 32, 64])])
def test_few_nodes_have_powers_of_two_and_small_steps_some_others(nodes, counts):
    few, sizes = problem(nodes), SizePolicy(few_operators=10**6)
    assert stage_counts(with_sizes(few, sizes), get("1f1b")) == counts
    powers = [s for s in counts if s != 3]
    small, larger = SizePolicy(few_operators=0, small_operators=10**6), SizePolicy(few_operators=0, small_operators=0)
    assert stage_counts(with_sizes(few, small), get("1f1b")) == powers
    assert stage_counts(with_sizes(few, larger), get("1f1b")) == powers


def with_sizes(problem: Problem, sizes: SizePolicy) -> Problem:
    return replace(problem, policy=replace(problem.policy, sizes=sizes))


@pytest.mark.slow
def test_stages_of_a_large_cluster_are_tried_where_their_number_is_free():
    fn, args = gpt.build(abstract=True, layers=3, scan=True, batch=12)
    told: list[str] = []
    # One stage takes 11 MB without a limit: with less its plan is no match for pipelines.
    free = autopar.parallelize(fn, cluster=toy(3, nodes=3, bandwidth=1e6), memory_limit="8.7MB", progress=told.append)
    plan = with_policy(free, SearchPolicy(sizes=SizePolicy(large_nodes=2))).plan(*args)
    assert any("planning stage 1 of 3" in t or "planning stage 3 of 3" in t for t in told), told
    assert plan.num_stages == 3
