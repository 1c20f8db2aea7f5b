"""Every way to cut a tiny step is tried, and none of a larger one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import pytest

import autopar
from autopar import MicrobatchError
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.search import Problem
from autopar.search.pipeline.candidates import all_slicings
from autopar.search.pipeline.partition import submeshes
from examples import mlp
from tests.search.problems import f32, problem_with, toy


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = y @ w
        return (y * y).mean()

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def problem(cluster: Cluster, layers: int = 4, fn=step, args=None, **options) -> Problem:
    args = ([f32(8, 8)] * layers, f32(16, 8)) if args is None else args
    traced = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0])
    whole = Problem(traced.graph, cluster, CostModel(cluster), source=TracedStages(step_of(traced)))
    return problem_with(whole, **{"num_stages": 2, "num_microbatches": 4, **options})


def slicings(made: Problem):
    assert made.source is not None
    return all_slicings(made, made.source)


def heavy(made: Problem) -> int:
    """Layers that the step may be cut into: one a product, and what is behind the last."""
    return sum(op.primitive == "dot_general" and op.scope.startswith("jvp") for op in made.graph.operators)


@pytest.mark.parametrize("stages", [2, 3])
def test_there_is_one_for_each_cut_and_sequence_of_submeshes(stages):
    made = problem(toy(4), num_stages=stages)
    found = slicings(made)
    assert found is not None and len(set(found)) == len(found)
    kinds = [m.size for m in submeshes(made.cluster)]
    homes = [h for h in itertools.product(kinds, repeat=stages) if sum(h) == 4]
    layers = len(found[0].layers)
    assert layers >= heavy(made) >= stages
    assert len(found) == math.comb(layers - 1, stages - 1) * len(homes)
    for c in found:
        assert sorted(d for first, n in c.devices for d in range(first, first + n)) == list(range(4))
        assert [id for m in c.members for id in m] == [id for layer in c.layers for id in layer]


def test_what_is_free_is_in_all_numbers():
    found = slicings(problem(toy(2), num_stages=None, num_microbatches=None))
    assert {(c.count, len(c.members)) for c in found or ()} == {(n, 2) for n in (1, 2, 4, 8, 16)}


def test_workers_of_their_own_are_equal():
    found = slicings(problem(toy(4), num_stages=2, uniform_stages=True))
    assert {c.devices for c in found or ()} == {((0, 2), (2, 2))}


def test_groups_of_devices_are_filled_each():
    device, link = Device("toy", 10**9, 1e10, (("f32", 1e9),)), LinkSpec(1e9, 1e-6)
    other = replace(device, kind="other")
    cluster = Cluster("mixed", (NodeGroup(1, 2, device, link, link), NodeGroup(1, 1, other, link, link)))
    found = slicings(problem(cluster, num_stages=2))
    assert {c.devices for c in found or ()} == {((0, 2), (2, 1)), ((2, 1), (0, 2))}


@pytest.mark.parametrize("schedule", ["interleaved", "chimera"])
def test_workers_with_several_stages_are_left_to_others(schedule):
    assert slicings(problem(toy(4), num_stages=4, schedule=schedule)) is None


@pytest.mark.slow
def test_larger_steps_and_clusters_are_left_to_the_dynamic_program():
    fn, args = mlp.build(abstract=True)
    assert slicings(problem(toy(4), fn=fn, args=args)) is None
    assert slicings(problem(toy(8 * 64, nodes=64), layers=8, num_stages=6)) is None, "more than are planned"


def test_what_cannot_be_cut_says_so():
    with pytest.raises(MicrobatchError):
        slicings(problem(toy(2), num_microbatches=3))


def test_it_is_faster_than_what_estimates_say():
    """A cut moves the weight gradients of the first layer, which no estimate knows (case 19 of the joint problems)."""
    device = Device("toy", 10**9, 1e6, (("f32", 1e6),))
    link = LinkSpec(1e4, 1e-3)
    cluster = Cluster("toy", (NodeGroup(2, 1, device, link, link),))
    args = ([f32(8, 4), f32(4, 16)], f32(4, 8))
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"}
    plan = autopar.parallelize(step, cluster=cluster, **options).plan(*args)
    each = plan.content.search.considered
    assert len(each) == 1 and each[0].step_time == plan.step_time
    assert plan.content.cuts[0].endswith("dot_general.0")
