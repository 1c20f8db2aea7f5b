"""The whole decision: one stage and pipelines on one node too, each stopped where the other is as fast."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.errors import InfeasiblePlanError
from autopar.schedule import Schedule, Table, get
from autopar.search.stage_regions import least_by_stages
from examples import mlp
from tests.search.problems import problem_of


def node(devices: int = 8, bandwidth: float = 1e6, jax_kinds: tuple[str, ...] = ()) -> Cluster:
    """One node whose links are slow next to its devices."""
    device = Device("toy", 10**9, 1e10, (("f32", 1e9),), jax_kinds=jax_kinds)
    link = LinkSpec(bandwidth, 1e-5)
    return Cluster("toy", (NodeGroup(1, devices, device, link, link),))


def step():
    return mlp.build(abstract=True, layers=8, hidden=256, batch=64)


@pytest.mark.slow
def test_free_on_one_node_is_as_fast_as_what_is_asked_for():
    fn, args = step()
    free = autopar.parallelize(fn, cluster=node()).plan(*args)
    asked = [
        autopar.parallelize(fn, cluster=node(), num_stages=stages, num_microbatches=count).plan(*args).step_time
        for stages, count in [(1, 1), (2, 8), (2, 16), (4, 8), (4, 16), (4, 32)]
    ]
    assert free.num_stages > 1
    assert asked[0] > 1.2 * free.step_time, "one stage is slower"
    assert free.step_time <= 1.01 * min(asked)
    assert free.search.lower_bound <= free.step_time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "devices", "bandwidth", "latency_s", "layers", "hidden", "asked"),
    [(2, 4, 2.26e7, 1.23e-4, 8, 256, (8, 16)), (1, 4, 4.8e6, 7.1e-6, 6, 64, (2, 16))],
)
def test_free_is_as_fast_as_drawn_stages_that_are_asked_for(
    nodes, devices, bandwidth, latency_s, layers, hidden, asked
):
    """Stages of one device on two nodes; and two stages, where others send for as long as they compute."""
    one = node(devices, bandwidth)
    link = LinkSpec(bandwidth, latency_s)
    group = replace(one.groups[0], count=nodes, intra=link, inter=LinkSpec(bandwidth, 4 * latency_s))
    cluster = replace(one, groups=(group,))
    fn, args = mlp.build(abstract=True, layers=layers, hidden=hidden, batch=64)
    free = autopar.parallelize(fn, cluster=cluster).plan(*args)
    stages, count = asked
    given = autopar.parallelize(fn, cluster=cluster, num_stages=stages, num_microbatches=count).plan(*args)
    assert free.step_time <= 1.01 * given.step_time


@pytest.mark.parametrize("name", ["data-parallel", "zero1", "megatron"])
def test_a_plan_that_is_named_has_stages_only_where_asked_for(name):
    """The step is one that is faster in stages."""
    fn, args = mlp.build(abstract=True, layers=4, hidden=128, batch=64)
    assert autopar.parallelize(fn, cluster=node(), search=name).plan(*args).num_stages == 1
    asked = autopar.parallelize(fn, cluster=node(), search=name, num_stages=2, num_microbatches=4)
    assert asked.plan(*args).num_stages == 2


@pytest.mark.slow
def test_where_links_are_fast_one_stage_is_taken():
    fn, args = step()
    assert autopar.parallelize(fn, cluster=node(bandwidth=1e12)).plan(*args).num_stages == 1


@pytest.mark.slow
def test_stages_in_one_process_on_a_cpu_are_taken_only_where_asked_for():
    fn, args = step()
    cluster = node(jax_kinds=("cpu",))
    assert autopar.parallelize(fn, cluster=cluster).plan(*args).num_stages == 1
    assert autopar.parallelize(fn, cluster=cluster, num_stages=2, num_microbatches=4).plan(*args).num_stages == 2


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("bandwidth", [1e6, 1e9])
def test_what_pipelines_could_reach_is_less_than_what_they_take(bandwidth):
    fn, args = step()
    problem = problem_of(fn, args, node(bandwidth=bandwidth), num_stages=None, num_microbatches=None)
    for stages, count in [(2, 4), (4, 16)]:
        taken = autopar.parallelize(fn, cluster=problem.cluster, num_stages=stages, num_microbatches=count).plan(*args)
        one = replace(problem, job=replace(problem.job, num_stages=stages))
        assert 0 < least_by_stages(one, [count])[stages][0] <= taken.step_time


def test_numbers_of_stages_are_ranked_without_tables_of_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has a task for each pass: of 64 stages and 4,096 microbatches half a million."""
    fn, args = mlp.build(abstract=True, layers=8, hidden=64, batch=4096)
    problem = problem_of(fn, args, node(), num_stages=None, num_microbatches=None)
    expected = least_by_stages(problem, None)

    def table(self: Schedule, num_stages: int, num_microbatches: int) -> Table:
        raise AssertionError("a table is made")

    monkeypatch.setattr(type(get("1f1b")), "table", table)
    assert least_by_stages(problem, None) == expected and set(expected) >= {2, 4, 8}
    interleaved = replace(problem, job=replace(problem.job, schedule="interleaved", num_stages=8))
    assert set(least_by_stages(interleaved, [1, 4, 6], [8])) == {8} and not least_by_stages(interleaved, [1, 6], [8])


@pytest.mark.slow
def test_a_pipeline_that_no_memory_holds_leaves_the_error_of_one_stage():
    fn, args = step()
    with pytest.raises(InfeasiblePlanError, match="the least that would do is") as caught:
        autopar.parallelize(fn, cluster=node(), memory_limit=1000).plan(*args)
    assert caught.value.least_bytes < math.inf


def test_a_step_without_a_backward_pass_has_no_stages_inside_a_node() -> None:
    def infer(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x

    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    assert autopar.parallelize(infer, cluster=node()).plan(*shapes).num_stages == 1
