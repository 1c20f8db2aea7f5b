"""Kernels by their sizes: products by waves, tiles and depth, and what a fused kernel reads and writes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.cost import CostModel, Matrices, kernel_rates
from autopar.cost.constants import load_constants
from autopar.search.intra import build, extract
from autopar.solver import solve
from benchmarks.published import products
from benchmarks.published.bill import bill_of
from tests.search.problems import f32, problem_of, toy

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
    errors, before = (abs(measured.part(1).errors(r, start_s)).mean() for r in (rates, replace(rates, products=())))
    assert errors < 0.11 and errors < before


def test_shallow_and_narrow_products_reach_less():
    def rate(m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k / product_s(m, n, k)

    assert rate(4096, 4096, 128) < 0.6 * rate(4096, 4096, 4096)
    assert rate(128, 128, 4096) < 0.2 * rate(4096, 4096, 4096)  # one tile on 108 cores
    assert product_s(4096, 4096, 4098) > 2 * product_s(4096, 4096, 4096)  # rows of no multiple of 16 bytes


def test_memory_limits_a_product_with_one_row():
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert product_s(1, 8192, 8192) >= moved / DEVICE.memory_bandwidth


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
