"""What no pipeline beats: the work of a step on all devices at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.cluster import Cluster, Curve, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.search.alpa import alpa
from autopar.search.bound import Freedom, work_bound_s
from examples import gpt, llama, mlp, moe, wide_resnet
from tests.search.inter.test_choices import mixed, nodes
from tests.search.problems import f32, graph_of, problem_of, toy

SHAPE = {"layers": 8, "hidden": 256, "batch": 64}


def plan(cluster, build=mlp.build, **options):
    fn, args = build(abstract=True, **SHAPE)
    return autopar.parallelize(fn, cluster=cluster, **options).plan(*args)


def test_it_counts_work_once():
    device = Device("toy", 10**9, 1e12, (("f32", 2e9), ("bf16", 8e9)), Curve.constant(0.5))
    cluster = Cluster("toy", (NodeGroup(1, 4, device, LinkSpec(1e9, 0.0), "intra"),))

    def step(x, w, v):
        def layer(y, w):
            return jnp.tanh(y @ w), None

        y, _ = lax.scan(layer, x, w)
        unused = x @ w[0]
        del unused
        return y.sum() + (x.astype(jnp.bfloat16) @ v).sum().astype(jnp.float32)

    graph = graph_of(step, f32(8, 16), f32(5, 16, 16), jax.ShapeDtypeStruct((16, 32), jnp.bfloat16))
    in_f32, in_bf16 = 5 * 2 * 8 * 16 * 16, 2 * 8 * 16 * 32
    # Sums go by memory, and elementwise operators that products or sums read; a conversion is read where it is needed.
    products = (in_f32 / 2e9 + in_bf16 / 8e9) / 0.5
    found = work_bound_s(graph, CostModel(cluster))
    assert products / 4 < found < products / 4 * 1.06
    slow = replace(device, memory_bandwidth=1e6)
    slower = Cluster("toy", (NodeGroup(1, 4, slow, LinkSpec(1e9, 0.0), "intra"),))
    # Of the five products x, w and the result go by memory; tanh of the loop reads it, and may be fused.
    five = 5 * 4 * (8 * 16 + 16 * 16 + 8 * 16) + 5 * 4 * 8 * 16
    one = 4 * 8 * 16 + 2 * 8 * 16 + 2 * (8 * 16 + 16 * 32 + 8 * 32)  # x as bf16 is written, then read
    wide = 6 * 8 * 32  # a sum in bf16 is one in f32 of what was converted to that
    sums = 4 * 8 * 16 + 4 + 4 * 8 * 32 + 4
    assert work_bound_s(graph, CostModel(slower)) == pytest.approx((five + one + wide + sums) / 1e6 / 4, rel=1e-3)


def test_less_of_an_operator_reaches_less_of_the_peak():
    """One stage splits it over all devices; of two stages one may have it whole, for both of their seconds."""
    curve = Curve(((1e3, 0.1), (1e6, 0.4)))
    device = Device("toy", 10**9, 1e15, (("f32", 1e9),), curve, launch_s=1e-3)
    cluster = Cluster("toy", (NodeGroup(1, 2, device, LinkSpec(1e9, 0.0), "intra"),))
    graph = graph_of(lambda x, w: x @ w, f32(64, 64), f32(64, 64))
    flops, cost = 2 * 64**3, CostModel(cluster)
    one, two = (work_bound_s(graph, cost, f) for f in (Freedom(), Freedom(one_stage=False, most_stages=2)))
    assert one == pytest.approx(1e-3 + flops / 2 / 1e9 / curve.at(flops / 2))
    assert two == pytest.approx(max((1e-3 + flops / 1e9 / curve.at(flops)) / 2, one / 2))
    assert work_bound_s(graph, cost) == min(one, two)
    assert work_bound_s(graph, CostModel(cluster, launch_s=0.0), Freedom()) == pytest.approx(one - 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt.build, llama.build, moe.build, mlp.build, wide_resnet.build])
@pytest.mark.parametrize("devices", [1, 4])
def test_it_is_close_to_the_optimum_of_one_stage_that_communicates_little(build, devices):
    fn, args = build("tiny", abstract=True)
    problem = problem_of(fn, args, toy(devices, bandwidth=1e15))
    optimum, bound = alpa(problem).search.lower_bound, work_bound_s(problem.graph, problem.cost_model)
    assert 0.85 * optimum <= bound <= optimum * (1 + 1e-9)


def test_a_pipeline_bound_by_arithmetic_is_as_far_from_it_as_its_bubble():
    device = Device("toy", 10**9, 1e15, (("f32", 2e9),))
    cluster = Cluster("toy", (NodeGroup(2, 1, device, LinkSpec(1e15, 0.0), LinkSpec(1e15, 0.0)),))
    found = plan(cluster, num_stages=2, num_microbatches=8, remat="none", donate_argnums=0)
    bound, step = found.search.lower_bound, found.step_time
    assert bound <= step <= bound * (8 + 1) / 8 * 1.1
    assert found.search.gap == pytest.approx(1 - bound / step)
    assert "from the optimum; for these stages its sharding is proven optimal" in str(found)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (nodes(inter=1e9), {"schedule": "gpipe"}),
        (nodes(inter=1e9), {"schedule": "zb-h1"}),
        (nodes(inter=1e9), {"schedule": "1f1b", "remat": "full"}),
        (nodes(inter=1e7), {}),
        (mixed(), {"schedule": "1f1b"}),
    ],
)
def test_no_plan_is_below_it(cluster, options):
    found = plan(cluster, num_stages=2, num_microbatches=4, **options)
    assert 0 < found.search.lower_bound <= found.step_time


@pytest.mark.slow
def test_scanned_and_unrolled_models_have_the_same():
    bounds = []
    for scan in (False, True):
        fn, args = gpt.build(abstract=True, scan=scan, layers=4)
        bounds.append(work_bound_s(graph_of(fn, *args), CostModel(nodes(inter=1e9))))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-3)  # of scalars some are made outside of the loop
