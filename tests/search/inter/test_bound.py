"""What no pipeline beats: the products of a step on all devices at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.cluster import Cluster, Curve, Device, LinkSpec, NodeGroup
from autopar.search.inter.bound import work_bound_s
from examples import gpt, mlp
from tests.search.inter.test_choices import mixed, nodes
from tests.search.problems import f32, graph_of

SHAPE = {"layers": 8, "hidden": 256, "batch": 64}


def plan(cluster, build=mlp.build, **options):
    fn, args = build(abstract=True, **SHAPE)
    return autopar.parallelize(fn, cluster=cluster, **options).plan(*args)


def test_it_counts_products_once():
    device = Device("toy", 10**9, 1e12, (("f32", 2e9), ("bf16", 8e9)), Curve(((1e3, 0.25), (1e6, 0.5))))
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
    assert work_bound_s(graph, cluster) == pytest.approx((in_f32 / 2e9 + in_bf16 / 8e9) / 4 / 0.5)


def test_a_pipeline_bound_by_arithmetic_is_as_far_from_it_as_its_bubble():
    device = Device("toy", 10**9, 1e15, (("f32", 2e9),))
    cluster = Cluster("toy", (NodeGroup(2, 1, device, LinkSpec(1e15, 0.0), LinkSpec(1e15, 0.0)),))
    found = plan(cluster, num_stages=2, num_microbatches=8, remat="none", donate_argnums=0)
    bound, step = found.search.lower_bound, found.step_time
    assert bound <= step <= bound * (8 + 1) / 8 * 1.1
    assert found.search.gap == pytest.approx(1 - bound / step)
    assert "from the optimum" in str(found) or "from the optimum" in found.summary()


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


def test_scanned_and_unrolled_models_have_the_same():
    bounds = []
    for scan in (False, True):
        fn, args = gpt.build(abstract=True, scan=scan, layers=4)
        bounds.append(work_bound_s(graph_of(fn, *args), nodes(inter=1e9)))
    assert bounds[0] == pytest.approx(bounds[1])
