"""What no plan beats is below every plan that is asked for by name, and what is sure of operators is what they do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cluster import Cluster, Curve, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel, LeastWork, Matrices, ProductDims
from autopar.cost.compute import least_roofline_s, roofline_s
from autopar.search.bound import Freedom, with_sends_s, work_bound_s
from autopar.search.sure_work import sure_works
from tests.search.problems import f32, graph_of, toy

#: Devices with kernels that start, are fused and overlap with what is sent; TPUs, that fuse products; plain ones.
CLUSTERS = {
    "kernels": Cluster.load("dgx-a100").part(0, 4),
    "slow links": Cluster.load("t4"),
    "fused products": Cluster.load("tpu-v5e").part(0, 4),
    "plain": toy(4, bandwidth=1e8, latency_s=1e-6, flops=1e10),
}

PLANS = (
    {"num_stages": 1, "num_microbatches": 1, "remat": "none"},
    {"num_stages": 1, "num_microbatches": 4, "remat": "full"},
    {"num_stages": 1, "num_microbatches": 2, "mesh_shape": (2, 2)},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"},
    {"num_stages": 2, "num_microbatches": 2, "schedule": "zb-h1"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved"},
    {"num_stages": 4, "num_microbatches": 1, "schedule": "gpipe"},
    {"num_stages": 3, "num_microbatches": 8, "schedule": "zb-h2"},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "chimera"},
)


def train_step(kinds, width, batch, momentum):
    """A train step of layers of some kinds, with its arguments."""

    def layer(kind, x, w):
        if kind == "tanh":
            return jnp.tanh(x @ w)
        if kind == "windows":
            images, kernel = x.reshape(-1, 4, 4, x.shape[1] // 16), w[: 9 * x.shape[1] // 16, : x.shape[1] // 16]
            kernel = kernel.reshape(3, 3, *images.shape[-1:] * 2)
            dims = ("NHWC", "HWIO", "NHWC")
            result = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims)
            return result.reshape(x.shape)
        if kind == "norm":
            y = jax.nn.gelu(x @ w)
            return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        scores = jax.nn.softmax((x @ w).reshape(x.shape[0], 4, -1), axis=-1)
        return x + scores.reshape(x.shape)

    def loss(weights, x):
        for kind, w in zip(kinds, weights, strict=True):
            x = layer(kind, x, w)
        return (x * x).mean()

    def step(state, x):
        weights, moments = state
        value, grads = jax.value_and_grad(loss)(weights, x)
        moments = [momentum * m + g for m, g in zip(moments, grads, strict=True)]
        return ([w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments), value

    weights = [f32(width, width) for _ in kinds]
    return step, ((weights, weights), f32(batch, width))


def check_plans(kinds, width, batch, cluster, asked):
    """No plan is below the bound of all plans, of one stage, of as many stages. Returns how many were there."""
    return check_plans_of(train_step(kinds, width, batch, 0.9), cluster, asked)


def check_plans_of(built, cluster, asked):
    """Likewise of a step and its arguments."""
    (fn, args), found = built, 0
    graph, cost = graph_of(fn, *args), CostModel(cluster)
    everything = work_bound_s(graph, cost, Freedom(most_stages=cluster.num_devices, sends=True))
    assert everything > 0
    for options in asked:
        try:
            plan = autopar.parallelize(fn, cluster=cluster, donate_argnums=0, **options).plan(*args)
        except autopar.AutoparError:
            continue
        found += 1
        stages = plan.num_stages
        own = Freedom() if stages == 1 else Freedom(one_stage=False, most_stages=stages, sends=True)
        least_s = work_bound_s(graph, cost, own)
        in_so_many = work_bound_s(graph, cost, replace(own, microbatches=plan.num_microbatches))
        bounds = [everything, least_s, in_so_many, plan.step_time]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(bounds)), (options, bounds)
        assert plan.search.lower_bound <= plan.step_time
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_plan_that_is_asked_for_is_below_it(cluster):
    asked = PLANS[1], PLANS[2], PLANS[4]
    assert check_plans(("tanh", "norm"), 64, 16, CLUSTERS[cluster], asked) == 3


def test_no_plan_on_measured_processors_is_below_it():
    """Products and convolutions are most of the step, each at its own rate."""
    cluster = Cluster.load("local-cpu").part(0, 4)
    assert check_plans(("tanh", "windows"), 256, 1024, cluster, (PLANS[1], PLANS[2], PLANS[4])) == 3


def gated(batch, seq, width, last):
    """A training step of a gated recurrence, whose loss reads all of its states or the last."""

    def loss(p, x):
        z = jax.nn.sigmoid(x @ p["z"])
        step = lambda h, s: (s[0] * h + (1 - s[0]) * s[1],) * 2  # noqa: E731
        _, states = jax.lax.scan(step, jnp.zeros((batch, width)), (z, x @ p["x"]))
        return ((states[-1] if last else jnp.tanh(states)) @ p["out"]).sum()

    def step(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    return step, ({k: f32(width, width) for k in ("z", "x", "out")}, f32(seq, batch, width))


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_plan_of_a_recurrence_is_below_it(last):
    """What its backward loop makes of its trips is stored before products read it."""
    cluster = CLUSTERS["kernels"]
    built = gated(16, 8, 64, last)
    # The stack [8, 16, 64] of trips has no batch dim in front: one microbatch.
    asked = [{**PLANS[n], "num_microbatches": 1} for n in (0, 1, 3)]
    assert check_plans_of(built, cluster, asked) == 3
    works = sure_works(graph_of(built[0], *built[1]), CostModel(cluster))
    assert sum("scan" in w.id and w.phase == "backward" for w in works) == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(["tanh", "norm", "softmax"]), min_size=1, max_size=4),
    st.sampled_from([8, 64, 512]),
    st.sampled_from([8, 64, 1024]),
    st.sampled_from(sorted(CLUSTERS)),
)
def test_no_plan_of_any_kind_is_below_it(kinds, width, batch, cluster):
    assert check_plans(kinds, width, batch, CLUSTERS[cluster], PLANS)


@pytest.mark.parametrize("name", ["dgx-a100", "tpu-v5e"])
def test_large_products_on_one_device_take_hardly_longer(name):
    cluster = Cluster.load(name).part(0, 1)
    fn, args = train_step(("tanh", "tanh"), 8192, 65536, 0.9)
    parallel = autopar.parallelize(fn, cluster=cluster, donate_argnums=0, memory_limit=10**13)
    step_s = parallel.plan(*args).step_time
    assert 0.95 * step_s <= work_bound_s(graph_of(fn, *args), CostModel(cluster), Freedom()) <= step_s * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.01, 1)), min_size=1, max_size=4, unique_by=lambda p: p[0]),
    st.floats(1, 1e10),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_no_part_takes_less_than_the_least(points, flops, parts, fewer):
    curve = Curve(tuple(sorted(points)))
    device = Device("toy", 10**9, 1e9, (("f32", 1e9),), curve, curve)
    least, used = least_roofline_s(flops, flops, "f32", device, parts), min(parts, fewer)
    assert least <= roofline_s(flops / used, flops / used, "f32", device) * (1 + 1e-9)
    assert least <= least_roofline_s(flops, flops, "f32", device, used) * (1 + 1e-9)
    whole = least_roofline_s(flops, flops, "f32", device, 1)
    assert whole <= parts * least * (1 + 1e-9)


@given(
    st.integers(0, 10),
    st.integers(0, 12),
    st.integers(0, 20),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(["dgx-a100", "h200"]),
)
def test_no_split_of_a_product_takes_less_than_the_least(rows, columns, depth, along, across, cluster):
    """However its dims are divided."""
    cost = CostModel(Cluster.load(cluster))
    whole = Matrices(1, 2**rows, 2**columns, 2**depth)
    work = LeastWork(whole.flops, whole.moved_bytes, ("bf16",), product=whole)
    parts = 2 ** (min(along, rows) + min(across, depth))
    split = replace(whole, m=2 ** max(0, rows - along), k=2 ** max(0, depth - across))
    taken = float(cost.product_s(split, "bf16"))
    assert cost.least_s(work, parts) <= taken * (1 + 1e-9)
    assert cost.least_s(work, 1) <= parts * cost.least_s(work, parts) * (1 + 1e-9)


#: Sizes of which some are aligned, and the parts of each.
_DIMS = st.tuples(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 12, 14, 20, 27, 33, 64, 100]), st.integers(1, 9))


@settings(max_examples=60)
@given(st.lists(_DIMS, min_size=4, max_size=4), st.sampled_from(["dot", "convolution", "kernel gradient"]))
def test_no_split_makes_a_product_faster_by_aligning_its_rows(dims, kind):
    """Whatever dims are divided and padded."""
    (a, split_a), (b, split_b), (k, split_k), (n, split_n) = dims
    image, taps = max(b, 3), (3, 3)
    if kind == "dot":
        op = graph_of(lambda x, y: jnp.einsum("abk,kn->abn", x, y), f32(a, b, k), f32(k, n)).operators[0]
        whole = ((a, b, k), (k, n)), (a, b, n)
        a, b, k, n = (-(-d // p) for d, p in ((a, split_a), (b, split_b), (k, split_k), (n, split_n)))
        part = ((a, b, k), (k, n)), (a, b, n)
    else:
        into, out = (taps, (image, image)) if kind == "convolution" else ((image, image), taps)
        numbers = jax.lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
        size = tuple(t + o - 1 for t, o in zip(into, out, strict=True))
        shapes = ((a, *size, k), (*into, k, n))
        conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)  # noqa: E731
        op, whole = graph_of(conv, *(f32(*shape) for shape in shapes)).operators[0], (shapes, (a, *out, n))
        image = -(-image // split_b)  # only the larger of windows and results is split
        into, out = (taps, (image, *out[1:])) if kind == "convolution" else ((image, *into[1:]), taps)
        a, k, n = (-(-d // p) for d, p in ((a, split_a), (k, split_k), (n, split_n)))
        part = ((a, *size, k), (*into, k, n)), (a, *out, n)
    parts, cost = split_a * split_b * split_k * split_n, CostModel(Cluster.load("dgx-a100"))
    dims = ProductDims.of(op, *whole)
    product, on_device, aligned = dims.matrices(4), ProductDims.of(op, *part).matrices(4), dims.aligned(4, parts)
    work = LeastWork(product.flops, product.moved_bytes, ("f32",), product=product, aligned=aligned)
    assert cost.least_s(work, parts) <= float(cost.product_s(on_device, "f32")) * (1 + 1e-9)
    seconds = [m * cost.least_s(work, m) for m in range(1, parts + 1)]
    assert all(few <= many * (1 + 1e-9) for few, many in itertools.pairwise(seconds))


def test_three_features_are_never_aligned():
    """A convolution of an image takes the rate of rows that are not, in any split."""
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    graph, cost = graph_of(conv, f32(1024, 64, 64, 3), f32(3, 3, 3, 256)), CostModel(CLUSTERS["kernels"])
    (least,) = (w.least for w in sure_works(graph, cost))
    assert cost.least_s(least, 4) > 1.5 * cost.least_s(replace(least, aligned=None), 4)


def test_what_is_sure_of_an_update():
    """Adam's moments and the parameter are read once and written once; what is between is fused."""
    fn, args = train_step(("tanh",), 256, 16, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(CLUSTERS["kernels"])
    works = [w for w in sure_works(graph, cost) if w.phase == "update"]
    assert sum(w.least.bytes for w in works if w.least.bytes > 1e4) == 4 * 4 * 256 * 256
    assert all(w.least.starts for w in works)
    products = [w.least for w in sure_works(graph, cost) if w.least.product is not None]
    assert [p.flops for p in products] == [2 * 16 * 256 * 256] * 2  # the batch asks for no gradient


def chain_s(layers, scanned, microbatches=1):
    """Launches on the longest chain of a step of layers, each of a second."""

    def loss(weights, x):
        layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        else:
            for n in range(layers):
                x = layer(x, weights[n])
        return (x * x).mean()

    def step(weights, x):
        return weights - 0.1 * jax.grad(loss)(weights, x)

    device = Device("toy", 10**9, 1e30, (("f32", 1e30),), launch_s=1.0)
    cluster = Cluster("toy", (NodeGroup(1, 64, device, LinkSpec(1e30, 0.0), "intra"),))
    graph = graph_of(step, f32(layers, 16, 16), f32(8, 16))
    stages = Freedom(one_stage=False, most_stages=10**6, microbatches=microbatches)
    return work_bound_s(graph, CostModel(cluster), stages)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_operators_that_wait_for_each_other_run_one_after_another_on_any_devices(scanned, count):
    """Forward a product a layer, backward one for the layer before; gradients of weights are no part of the chain."""
    three, five = (chain_s(n, scanned, count) for n in (3, 5))
    assert five - three >= 2 * 2
    assert three >= 3 + 2


def test_steps_that_do_not_wait_have_no_chain():
    fn, args = train_step(("tanh",) * 4, 64, 16, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(CLUSTERS["slow links"])
    waits = Freedom(one_stage=False, most_stages=10**6)
    assert work_bound_s(graph, cost, replace(waits, is_synchronous=False)) < 0.7 * work_bound_s(graph, cost, waits)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1.0), st.integers(1, 512), st.floats(0.0, 1e-2))
def test_no_equal_pipeline_takes_less_than_a_chain_with_its_sends(chain_s, count, latency_s):
    """W workers with a W-th of the chain each: the first microbatch, what it waits for, and then one after another."""
    least_s = with_sends_s(chain_s, count, latency_s)
    assert least_s >= chain_s
    for workers in (*range(1, 65), 128, 1024, 10**5):
        step_s = chain_s + latency_s * (workers - 1) + (count - 1) * chain_s / workers
        halves_s = chain_s + latency_s * (workers - 1) + (max(1, count / 2) - 1) * chain_s / workers  # as of Chimera
        assert least_s <= min(step_s, halves_s) * (1 + 1e-9)


@pytest.mark.parametrize("count", [16, 64])
def test_what_a_chain_sends_is_in_the_bound_of_pipelines(count):
    """Sixteen layers whose launches take a second each, on up to 64 devices, with links of sixteen seconds."""
    device = Device("toy", 10**9, 1e30, (("f32", 1e30),), launch_s=1.0)
    cluster = Cluster("toy", (NodeGroup(1, 64, device, LinkSpec(1e30, 16.0), "intra"),))
    fn, args = train_step(("tanh",) * 16, 16, 8 * count, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(cluster)
    waits = Freedom(one_stage=False, most_stages=64, microbatches=count)
    without, with_sends = (work_bound_s(graph, cost, replace(waits, sends=sends)) for sends in (False, True))
    assert with_sends > 1.02 * without
    single = replace(waits, most_stages=1)
    assert work_bound_s(graph, cost, replace(single, sends=True)) == work_bound_s(graph, cost, single)


def test_prices_of_another_class_have_no_bound():
    class Mine(CostModel):
        pass

    fn, args = train_step(("tanh",), 8, 8, 0.9)
    graph = graph_of(fn, *args)
    assert work_bound_s(graph, Mine(toy(2))) == 0.0 < work_bound_s(graph, CostModel(toy(2)))


def test_attention_that_may_run_in_blocks_is_counted_by_half_its_products():
    def loss(q, k, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v).sum()

    graph = graph_of(jax.grad(loss), f32(2, 64, 8), f32(2, 64, 8), f32(2, 64, 8))
    cost = CostModel(CLUSTERS["kernels"])
    plain, blocks = (list(sure_works(graph, cost, scores)) for scores in (0, 1))
    assert sum(w.least.flops for w in blocks) < 0.55 * sum(w.least.flops for w in plain)
    assert sum(w.least.bytes for w in blocks) < 0.2 * sum(w.least.bytes for w in plain)


@pytest.mark.slow
def test_pairs_of_all_stage_counts_are_ordered():
    fn, args = train_step(("tanh", "norm"), 64, 16, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(CLUSTERS["kernels"])
    bounds = [work_bound_s(graph, cost, Freedom(one_stage=False, most_stages=n)) for n in (2, 3, 4)]
    assert all(a >= b for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("cluster", ["h200", "tpu-v5e"])
def test_a_step_of_the_highest_precision_takes_longer_and_the_bound_says_so(cluster):
    """Priced at the rate of plain float32, not at that of the default precision."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    part, args = Cluster.load(cluster).part(0, 1), (f32(4096, 4096), f32(4096, 4096))
    seconds, bounds = [], []
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            step = jax.grad(lambda w, x: loss(w, x))
            seconds.append(autopar.parallelize(step, cluster=part).plan(*args).step_time)
            bounds.append(work_bound_s(graph_of(step, *args), CostModel(part), Freedom()))
    assert seconds[1] > 4 * seconds[0]
    assert all(0.8 * s <= b <= s * (1 + 1e-9) for s, b in zip(seconds, bounds, strict=True))
