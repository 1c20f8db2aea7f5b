"""What the search of pipelines chooses on clusters where the answer is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, InfeasiblePlanError
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.search import Problem
from autopar.search.alpa import alpa
from autopar.search.pipeline.partition import worthwhile
from autopar.search.pipeline.search import pipeline
from autopar.search.several_stages import SeveralStages
from examples import mlp
from tests.end_to_end.clusters import MIDDLE
from tests.search.problems import problem_with

SHAPE = {"hidden": 256, "batch": 64}


def nodes(inter: float, memory: int = 10**9, count: int = 2, per_node: int = 4) -> Cluster:
    device = Device("toy", memory, 1e12, (("f32", 2e9),))
    inside = LinkSpec(1e11, 1e-7)
    return Cluster("toy", (NodeGroup(count, per_node, device, inside, LinkSpec(inter, 1e-7)),))


def plan(cluster: Cluster, layers: int = 8, **options):
    fn, args = mlp.build(abstract=True, layers=layers, **SHAPE)
    return autopar.parallelize(fn, cluster=cluster, **options).plan(*args)


def test_slow_links_between_nodes_have_stages_on_both_sides():
    found = plan(nodes(inter=1e7), layers=4)
    assert found.num_stages > 1
    for stage in found.stages:
        assert len({d // 4 for d in stage.devices}) == 1, "a stage lies inside a node"


def test_a_fast_flat_cluster_has_one_stage():
    assert plan(nodes(inter=1e11)).num_stages == 1


def mixed(slow_memory: int = 10**9) -> Cluster:
    """Four devices that are four times as fast as four others."""
    fast, slow = (Device(n, m, 1e12, (("f32", f),)) for n, m, f in (("a", 10**9, 4e9), ("b", slow_memory, 1e9)))
    inside, between = LinkSpec(1e11, 1e-7), LinkSpec(1e9, 1e-7)
    return Cluster("mixed", (NodeGroup(1, 4, slow, inside, between), NodeGroup(1, 4, fast, inside, between)))


@pytest.mark.slow
def test_stages_lie_in_one_group_and_the_faster_group_has_more_layers():
    found = plan(mixed(), num_stages=2, num_microbatches=4)
    work = {s.devices: sum("dot_general" in id for id in s.operators) for s in found.stages}
    assert set(work) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert work[4, 5, 6, 7] > 2 * work[0, 1, 2, 3]
    slowest, fastest = sorted((s.step_time for s in found.stages), reverse=True)
    assert slowest < 2 * fastest, "equal work would take four times as long on the slow ones"


def test_each_group_has_a_memory_of_its_own():
    found = plan(mixed(slow_memory=600_000), num_stages=2, num_microbatches=4)
    by_devices = {s.devices[0]: s.memory.total for s in found.stages}
    assert by_devices[0] <= 600_000 < by_devices[4]


def test_uneven_models_get_uneven_slices():
    """Of six layers the first two do most of the work: their stage has fewer layers."""
    sizes = [1024, 1024, 1024, 128, 128, 128, 128]

    def step(params, batch):
        def loss(p):
            x = batch["x"]
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params), strict=True)]

    args = (
        [jax.ShapeDtypeStruct(s, jnp.float32) for s in itertools.pairwise(sizes)],
        {"x": jax.ShapeDtypeStruct((64, 1024), jnp.float32)},
    )
    found = autopar.parallelize(step, cluster=nodes(inter=2e8), num_stages=2, num_microbatches=4).plan(*args)
    layers = [sum("dot_general" in id and id.startswith("jvp") for id in s.operators) for s in found.stages]
    assert sum(layers) == 6
    assert layers[0] < layers[1]


def test_what_cannot_be_says_what_is_short():
    with pytest.raises(InfeasiblePlanError):
        plan(nodes(inter=2e8, memory=200_000), num_stages=2, num_microbatches=4, remat="none")


@pytest.mark.slow
def test_a_stage_without_choices_is_a_stage():
    """The smallest model on many stages: some have nothing to choose, which is no reason to give up."""
    fn, args = mlp.build(abstract=True)
    assert autopar.parallelize(fn, cluster=MIDDLE, num_stages=4, num_microbatches=2).plan(*args).num_stages == 4


@pytest.mark.parametrize(
    ("count", "stages", "uneven", "sizes"),
    [
        (4, 4, 1, [4]),
        (4, 4, 2, [2, 4, 8]),
        (6, 2, 1, [12]),  # three nodes each, which is not a power of two
        (3, 2, 1, [4, 8]),  # a node and a half each cannot be
        (3, 8, 1, [1, 2]),
        (2, 16, 1, []),
    ],
)
def test_submeshes_near_the_even_share(count, stages, uneven, sizes):
    assert [m.size for m in worthwhile(nodes(1e9, count=count), stages, uneven)] == sizes


@pytest.mark.slow
def test_equal_stages_have_as_many_devices():
    """Of an uneven model too: on workers a stage is not to share one with another."""
    sizes = [2048, 2048, 512, 512, 512]

    def step(params, batch):
        def loss(p):
            x = batch
            for w in p:
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        return [p - g for p, g in zip(params, jax.grad(loss)(params), strict=True)]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in itertools.pairwise(sizes)]
    args = (shapes, jax.ShapeDtypeStruct((64, sizes[0]), jnp.float32))
    function = PureFunction(step, ParallelOptions(cluster=nodes(1e8), num_stages=3, num_microbatches=4))
    traced, _ = function.plan(function.resolve(args, {})[0])
    found = {}
    for equal in (False, True):
        job = replace(function.problem(traced, None).job, num_stages=4, num_microbatches=4)
        whole = step_of(traced)
        problem = Problem(whole.graph, nodes(1e8), CostModel(nodes(1e8)), job=job, source=TracedStages(whole))
        problem = problem_with(problem, uniform_stages=equal)
        found[equal] = [len(s.devices) for s in pipeline(problem, alpa).stages]
    assert found[True] == [2, 2, 2, 2]
    assert found[False] != found[True]


@pytest.mark.slow
def test_several_stages_are_planned_where_they_may_be_faster_than_one(monkeypatch):
    cutoffs = []
    several = SeveralStages.pipeline

    def pipeline(self):
        cutoffs.append(self.problem.subproblem.cutoff_s)
        return several(self)

    slow = nodes(inter=1e7)
    one = plan(slow, num_stages=1)
    monkeypatch.setattr(SeveralStages, "pipeline", pipeline)
    free = plan(slow)
    assert free.num_stages > 1 and cutoffs[0] >= one.step_time > free.step_time
    alone = plan(nodes(inter=1e11, count=1))
    assert alone.num_stages == 1 and all(s <= alone.step_time for s in cutoffs[1:]), "one stage is planned first"
