"""What a device's figures of kinds of work add to plans, and what a fusion reads that computes a value again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster, Curve
from autopar.cost import CostModel, KernelWork
from autopar.cost.model import KEPT_BYTES
from autopar.cost.orders import PACKED_STRIDE_BYTES
from autopar.plan import Plan
from autopar.search import alpa
from autopar.search.intra.work import Chains, busy_seconds
from autopar.sharding import rule_for, strategies
from tests.search.problems import f32, graph_of, problem_of, toy

TOKENS, WIDTH = (4, 64), 32


def _cluster(**figures: Any) -> Cluster:
    (group,) = toy(1).groups
    return Cluster("toy", (replace(group, device=replace(group.device, **figures)),))


def _plan(fn: Any, *args: Any, **figures: Any) -> Plan:
    return alpa(problem_of(fn, args, _cluster(**figures)))


def _gradient(x: Any, y: Any) -> Any:
    return jnp.einsum("bsi,bsj->ij", x, y)


def _added_s(fn: Any, *args: Any, **figures: Any) -> float:
    """Seconds that figures add to a plan."""
    return _plan(fn, *args, **figures).step_time - _plan(fn, *args).step_time


def test_a_function_takes_its_seconds_an_element() -> None:
    figures = {"function_s": (("exp", 1e-6), ("sin", 1.0))}
    assert _added_s(lambda x: jnp.exp(x) * 2, f32(64, 32), **figures) == pytest.approx(64 * 32 * 1e-6)
    assert _added_s(lambda x: jnp.tanh(x) * 2, f32(64, 32), **figures) == 0


def test_a_loop_takes_a_function_in_every_trip() -> None:
    def fn(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.exp(c), None), x, None, length=5)[0]

    assert _added_s(fn, f32(64), function_s=(("exp", 1e-6),)) == pytest.approx(5 * 64 * 1e-6)


def test_devices_share_the_elements() -> None:
    (group,) = toy(4).groups
    many = Cluster("toy", (replace(group, device=replace(group.device, function_s=(("exp", 1e-3),))),))
    found = [alpa(problem_of(lambda x: jnp.exp(x), (f32(64, 32),), c)).step_time for c in (many, toy(4))]
    assert found[0] - found[1] == pytest.approx(64 * 32 / 4 * 1e-3)


def test_a_gradient_of_a_weight_reads_its_operand_in_another_order() -> None:
    figures = {"reorder_efficiency": Curve(((WIDTH * 4, 0.001), (WIDTH * 8, 0.9)))}
    args = (f32(*TOKENS, WIDTH), f32(*TOKENS, 16))
    size = 4 * 4 * 64 * WIDTH
    assert _added_s(_gradient, *args, **figures) == pytest.approx(size / (1e10 * 0.001))
    assert _added_s(lambda x, w: x @ w, f32(*TOKENS, WIDTH), f32(WIDTH, 16), **figures) == 0


def test_of_a_gradient_that_is_transposed_the_other_operand_is_copied() -> None:
    args = (f32(*TOKENS, WIDTH), f32(*TOKENS, 16))
    figures = {"reorder_efficiency": Curve(((PACKED_STRIDE_BYTES, 0.001), (PACKED_STRIDE_BYTES + 1, 1.0)))}
    plain_s, swapped_s = (_added_s(fn, *args, **figures) for fn in (_gradient, lambda x, y: _gradient(x, y).T))
    left, right = (4 * 4 * 64 * n for n in (WIDTH, 16))
    assert plain_s == pytest.approx(left / (1e10 * 0.001))
    assert swapped_s == pytest.approx(right / (1e10 * 0.001))


def test_both_matrices_of_a_gradient_of_rows_are_packed() -> None:
    figures = {"reorder_efficiency": Curve(((PACKED_STRIDE_BYTES, 0.001), (PACKED_STRIDE_BYTES + 1, 1.0)))}
    packed_s = _added_s(lambda x, y: jnp.tensordot(x, y, ((0,), (0,))), f32(256, WIDTH), f32(256, 16), **figures)
    assert packed_s == pytest.approx(4 * 256 * (WIDTH + 16) / (1e10 * 0.001))


def test_a_device_copies_its_pieces_of_what_is_split_and_the_whole_of_others() -> None:
    graph = graph_of(_gradient, f32(*TOKENS, WIDTH), f32(*TOKENS, 16))
    (op,) = (o for o in graph.operators if o.primitive == "dot_general")
    types = tuple(graph.types[str(o)] for o in op.operands)
    cluster = _cluster(reorder_efficiency=Curve.constant(0.001))
    (mesh,) = toy(4).logical_meshes((4,))
    choices = strategies(rule_for(op, types)[0], types, tuple(v.type for v in op.results), mesh)
    work = KernelWork(0.0, 0.0, "f32", reordered=((8000.0, 128),), copied=(0,))
    seconds = busy_seconds(CostModel(cluster), mesh, work, choices, op, types)
    split = [bool(s.operand_layouts[0].axes) for s in choices]
    assert {True, False} == set(split) and {1, 4} == {s.split for s in choices}
    assert list(seconds) == pytest.approx([8000 / 1e7 / (4 if s else 1) for s in split])


def test_what_the_operand_is_computed_from_is_read_in_that_order() -> None:
    def fn(a: Any, b: Any, y: Any) -> Any:
        x = a + b
        return _gradient(x, y), x.sum()

    args = (f32(*TOKENS, WIDTH), f32(*TOKENS, WIDTH), f32(*TOKENS, 16))
    size = 2 * 4 * 4 * 64 * WIDTH
    assert _added_s(fn, *args, reorder_efficiency=Curve.constant(0.001)) == pytest.approx(size / (1e10 * 0.001))


def test_short_sums_take_as_long_as_their_runs_say() -> None:
    figures = {"reduction_efficiency": Curve(((16, 0.001), (1024, 1.0)))}
    moved = 4 * 8 * 256 * (4 + 1)
    slow_s = moved / (1e10 * 0.001) - moved / 1e10
    assert _added_s(lambda x: x.sum(2), f32(8, 256, 4), **figures) == pytest.approx(slow_s)
    assert _added_s(lambda x: x.sum(0), f32(8, 256, 4), **figures) == pytest.approx(0, abs=1e-9)


def test_new_memory_is_that_of_temporaries_alone() -> None:
    rows = KEPT_BYTES // 4 // 1024

    def fn(x: Any, w: Any) -> Any:
        return (x @ w) @ w

    def returned(x: Any, w: Any) -> Any:
        y = x @ w
        return y, y @ w

    large, small = f32(rows, 1024), f32(rows // 2, 1024)
    added_s = _added_s(fn, large, f32(1024, 1024), first_touch_bandwidth=1e6)
    assert added_s == pytest.approx(KEPT_BYTES / 1e6, rel=1e-3)  # x @ w alone: the rest are inputs and the result
    assert _added_s(returned, large, f32(1024, 1024), first_touch_bandwidth=1e6) == 0
    assert _added_s(fn, small, f32(1024, 1024), first_touch_bandwidth=1e6) == 0


def _read_bytes(fn: Any, *args: Any) -> float:
    """Of the first operand of the one product."""
    graph = graph_of(fn, *args)
    (product,) = (op for op in graph.operators if op.primitive == "dot_general")
    return Chains(graph).read_bytes(str(product.operands[0]))


def test_chains() -> None:
    a, w, row = f32(8, 16), f32(16, 4), f32(16)
    size = 4 * 8 * 16
    assert _read_bytes(lambda x, w: x @ w, a, w) == size
    assert _read_bytes(lambda x, w: (x * 2 + 1) @ w, a, w) == size
    assert _read_bytes(lambda x, y, w: (x + y) @ w, a, a, w) == 2 * size
    assert _read_bytes(lambda x, y, w: ((x + y) * x) @ w, a, a, w) == 2 * size  # each once
    assert _read_bytes(lambda x, r, w: (x + r) @ w, a, row, w) == size + 4 * 16
    assert _read_bytes(lambda x, w: x[:8] @ w, f32(1000, 16), w) == size  # no more than is taken
    assert _read_bytes(lambda x, w: (x - x.sum(1, keepdims=True)) @ w, a, w) == size + 4 * 8
    assert _read_bytes(lambda x, w: (x + jnp.ones((8, 16))) @ w, a, w) == size  # made on demand


def test_dear_operators_are_computed_once() -> None:
    a, w = f32(8, 16), f32(16, 4)
    size = 4 * 8 * 16

    def shared(x: Any, y: Any, w: Any) -> Any:
        e = jnp.exp(x + y)
        return e @ w, e

    assert _read_bytes(lambda x, y, w: jnp.exp(x + y) @ w, a, a, w) == 2 * size
    assert _read_bytes(shared, a, a, w) == size
