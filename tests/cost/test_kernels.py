"""Kernels by their sizes: products by waves, tiles and depth, and what a fused kernel reads and writes."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster
from autopar.cost import CostModel, KernelRates, Matrices, kernel_rates, matrices_of
from autopar.cost.constants import load_constants
from autopar.search.intra import build, extract
from autopar.solver import solve
from benchmarks.published import products
from benchmarks.published.bill import bill_of
from tests.search.problems import f32, graph_of, problem_of, toy

A100 = Cluster.load("dgx-a100")
DEVICE = A100.groups[0].device
RATES = kernel_rates(DEVICE, load_constants())
assert RATES is not None


def product_s(m: float, n: float, k: float, batch: float = 1.0) -> float:
    product = Matrices(batch, m, n, k)
    return RATES.product_s(product, "bf16", DEVICE, misaligned=product.misaligned, moved=product.moved_bytes)


def test_large_products_reach_their_share_of_the_best_rate():
    flops = 2 * 16384.0**3
    best = DEVICE.flops("bf16") * 0.869 * RATES.product_share
    assert best * 0.97 < flops / product_s(16384, 16384, 16384) < best


@pytest.mark.parametrize("measured", products.measured(), ids=lambda p: f"{p.device.kind} {p.dtype}")
def test_products_that_were_measured_but_not_fitted(measured: products.Products) -> None:
    """The file has what is fitted to every other product; others are nearer than by the constants of all devices."""
    sizes, start_s = products.fit(measured.part(0))
    rates = kernel_rates(measured.device, load_constants())
    assert rates is not None and dict(rates.products)[measured.dtype] == sizes
    undivided = replace(rates, partial_bytes=math.inf)
    others = [rates, undivided, replace(rates, products=())]
    errors, whole, before = (abs(measured.part(1).errors(r, start_s)).mean() for r in others)
    assert errors < 0.11 and errors <= whole and errors < before


def test_partial_sums_cost_what_is_fitted() -> None:
    fitted = products.fit_partial_bytes([measured.part(0) for measured in products.measured()])
    assert load_constants().kernels.partial_bytes == fitted


#: Rows, columns, depth and seconds on one H200 in f32, of `python -m benchmarks.device --products 24` on 2026-11-28.
DEEP = ((3072, 384, 16384, 180e-6), (1536, 256, 16384, 89e-6))


def test_deep_sums_of_few_tiles_are_nearer_to_what_was_measured_if_they_are_divided() -> None:
    (device,) = Cluster.load("h200").device_types
    rates = kernel_rates(device, load_constants())
    assert rates is not None
    m, n, k, seconds = np.array(DEEP, float).T
    deep = Matrices(1, m, n, k, 4)

    def error(rates: KernelRates) -> float:
        found = rates.product_s(deep, "f32", device, misaligned=False, moved=deep.moved_bytes)
        return float(abs(np.log(found / seconds)).mean())

    assert error(rates) < error(replace(rates, partial_bytes=math.inf))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 20), st.sampled_from(["bf16", "f32", "f8_e4m3fn"]))
def test_depth_is_divided_among_idle_cores_as_far_as_it_saves_time(rows, columns, depth, dtype):
    """The least over all divisions that leave no more pieces than cores, each priced as a product of its own."""
    (device,) = Cluster.load("h200").device_types
    rates = kernel_rates(device, load_constants())
    m, n, k = 2.0**rows, 2.0**columns, 2.0**depth
    undivided = replace(rates, partial_bytes=math.inf, memory_share=1e9)

    def priced(rates: KernelRates, m: float, k: float, partial_bytes: float = 0.0) -> float:
        alone_s = rates.product_s(Matrices(1, m, n, k), dtype, device, misaligned=False, moved=0.0)
        return float(alone_s) + partial_bytes / (device.memory_bandwidth * 0.85)

    most = max(1.0, 128 * 128 * rates.cores / (m * n))
    pieces = [1.0, *np.geomspace(1.0, most, 400)]
    by_pieces = [
        priced(undivided, s * m, k / s, rates.partial_bytes * s * m * n if i else 0.0) for i, s in enumerate(pieces)
    ]
    assert priced(rates, m, k) == pytest.approx(min(by_pieces), rel=1e-3)


def test_shallow_and_narrow_products_reach_less():
    def rate(m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k / product_s(m, n, k)

    assert rate(4096, 4096, 128) < 0.6 * rate(4096, 4096, 4096)
    assert rate(128, 128, 4096) < 0.2 * rate(4096, 4096, 4096)  # one tile on 108 cores
    assert product_s(4096, 4096, 4098) > 2 * product_s(4096, 4096, 4096)  # rows of no multiple of 16 bytes


def test_memory_limits_a_product_with_one_row():
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert product_s(1, 8192, 8192) >= moved / DEVICE.memory_bandwidth


def test_convolutions_read_each_element_once_and_multiply_no_zeros():
    """The gradient of a convolution with strides has zeros between the elements of its operand, three of four here."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = f32(8, 32, 32, 64), f32(3, 3, 64, 128)
    graph = graph_of(jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1)), x, w)
    forward, *others = (op for op in graph.operators if op.primitive == "conv_general_dilated")
    (gradient,) = (op for op in others if op.ints("lhs_dilation") != (1, 1))

    def product(op):
        shapes = [t.shape for t in graph.operand_types(op)]
        return matrices_of(op, shapes, op.results[0].type.shape, 4)

    assert product(gradient).flops == product(forward).flops
    for op in (forward, *others):
        elements = sum(t.size for t in graph.operand_types(op)) + op.results[0].type.size
        assert product(op).moved_bytes == 4 * elements


def test_devices_of_unknown_cores_have_no_rates():
    assert kernel_rates(toy().groups[0].device, load_constants()) is None
    assert not CostModel(Cluster.load("tpu-v5e")).knows_kernels
    assert CostModel(A100).knows_kernels


def _bill(fn, *args, cluster=None):
    problem = problem_of(fn, args, cluster or Cluster.load("dgx-a100").part(0, 1))
    (mesh,) = problem.cluster.logical_meshes((1,))
    stated = build(problem, mesh)
    choice = solve(stated.problem).choice
    return bill_of(problem, stated, choice), extract(problem, stated, choice)


def test_a_softmax_reads_its_scores_three_times_and_writes_once():
    """Maximum, sum, and the quotients: each a kernel that reads the scores in memory."""
    n = 512 * 512

    def softmax(x):
        shifted = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return shifted / jnp.sum(shifted, axis=-1, keepdims=True)

    found, _ = _bill(softmax, f32(512, 512))
    kernels = [k for k in found.kernels if k.bytes > 4 * n]
    assert [k.primitive for k in kernels] == ["reduce_max", "reduce_sum", "div"]
    assert sum(k.bytes for k in kernels) == pytest.approx(4 * 4 * n, rel=0.02)


def test_what_constants_decide_is_never_read():
    found, _ = _bill(lambda x: x + jnp.full((256, 256), 2.0) * 3.0, f32(256, 256))
    assert sum(k.bytes for k in found.kernels) == 2 * 4 * 256 * 256


def test_a_value_that_two_kernels_read_is_computed_in_both():
    found, _ = _bill(lambda x: (jnp.sum(x * 2.0, axis=0), jnp.sum(x * 2.0 + 1.0, axis=1)), f32(1024, 1024))
    assert sum(k.bytes for k in found.kernels) == pytest.approx(2 * 4 * 1024**2, rel=0.01)


@pytest.mark.slow
def test_the_bill_adds_up_to_the_seconds_of_the_plan():
    found, sharding = _bill(lambda a, b: jnp.tanh(a @ b).sum(), f32(512, 512), f32(512, 512))
    assert sum(k.seconds * k.count for k in found.kernels) == pytest.approx(sharding.compute_s, rel=1e-12)
    assert sum(m.seconds * m.count for m in found.messages) == pytest.approx(sharding.communication_s, rel=1e-12)


def _stacks_s(fn, *args) -> float:
    """Seconds that a step on one H200 takes longer as a program of XLA than without copies of stacks."""
    cluster = Cluster.load("h200").part(0, 1)
    compiled, plain = (_bill(fn, *args, cluster=replace(cluster, stack=name))[1] for name in ("xla", "plain"))
    return compiled.compute_s - plain.compute_s


STACK = f32(8, 2048, 2048)
STACK_BYTES = 4 * 8 * 2048**2


def _scanned(body, length=8):
    return lambda x, stack: jax.lax.scan(body, x, stack, length=length)


@pytest.mark.parametrize(
    ("body", "moves"),
    [
        (lambda c, x: (c + x, None), 0),  # a slice is read where it lies
        (lambda c, x: (c @ x, None), 2),  # a library takes a copy of it
        (lambda c, x: (c + x, jnp.exp(x)), 1),  # the stack is zeros before; exp writes it
        (lambda c, x: ((y := jnp.exp(x)) @ c, y), 3),  # zeros, and a copy of what the body reads too
        (lambda c, x: (y := c + x, y), 3),  # or hands on to the next trip
    ],
    ids=["read", "multiplied", "kept", "kept and read", "kept and carried"],
)
def test_stacks_of_loops_are_zeroed_and_copied_as_the_kernels_of_an_h200_show(body, moves):
    """Zeros by `loop_broadcast`, results by `loop_dynamic_update_slice`, operands by `memcpy128`, in its traces."""
    (device,) = Cluster.load("h200").device_types
    launches = 8 * device.launch_s * (moves > 1)
    expected_s = moves * STACK_BYTES / (device.memory_bandwidth * 0.85) + launches
    assert _stacks_s(_scanned(body), f32(2048, 2048), STACK) == pytest.approx(expected_s, rel=1e-3, abs=1e-12)


def test_a_loop_of_one_trip_and_other_programs_have_no_stacks():
    def body(c, x):
        return c @ x, jnp.tanh(c)

    assert _stacks_s(_scanned(body, 1), f32(2048, 2048), f32(1, 2048, 2048)) == 0
    tpu = Cluster.load("tpu-v5e").part(0, 1)
    assert CostModel(tpu).stacking_s(1e9, 3) == 0
    assert CostModel(replace(A100, stack="megatron")).stacking_s(1e9, 3) == 0
