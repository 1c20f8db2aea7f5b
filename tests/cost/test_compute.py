"""FLOPs and bytes of operators against XLA's own count, and the roofline against its formula."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.dtypes import dtype_name
from autopar.cluster import Cluster, Curve, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel, operator_bytes, operator_flops, roofline_s
from autopar.frontend.attrs import attrs_of
from autopar.ir import Graph, Literal, Operator, TensorType, Value


def _type(aval):
    return TensorType(tuple(aval.shape), dtype_name(aval.dtype))


def _operator(function, *shapes, dtype=jnp.float32):
    """The last equation of ``function`` as an operator, with the types of its operands."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).jaxpr
    equation = jaxpr.eqns[-1]
    names = {v: f"v{i}" for i, v in enumerate(equation.invars) if not isinstance(v, JaxLiteral)}
    operands = tuple(
        Literal(str(v.val), _type(v.aval)) if isinstance(v, JaxLiteral) else names[v] for v in equation.invars
    )
    results = tuple(Value(f"r{i}", _type(v.aval)) for i, v in enumerate(equation.outvars))
    op = Operator("op", equation.primitive.name, operands, results, attrs_of(equation.params))
    return op, tuple(_type(v.aval) for v in equation.invars)


def _xla_flops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.jit(function).lower(*arguments).cost_analysis().get("flops", 0)


small = st.integers(1, 5)


@settings(max_examples=15, deadline=None)
@given(small, small, small, small, st.sampled_from(["bij,bjk->bik", "bij,kjb->bik", "bij,bij->b", "ij,kl->ijkl"]))
def test_dot_general(b, i, j, k, spec):
    size = dict(b=b, i=i, j=j, k=k, l=b)
    left, right = spec.split("->")[0].split(",")
    shapes = tuple(tuple(size[c] for c in side) for side in (left, right))
    contract = [c for c in left if c in right and c not in spec.split("->")[1]]
    batch = [c for c in left if c in right and c in spec.split("->")[1]]
    numbers = (
        (tuple(left.index(c) for c in contract), tuple(right.index(c) for c in contract)),
        (tuple(left.index(c) for c in batch), tuple(right.index(c) for c in batch)),
    )
    op, types = _operator(lambda x, y: lax.dot_general(x, y, numbers), *shapes)
    loops = 1
    for c in set(left + right):
        loops *= size[c]
    assert operator_flops(op, types) == 2 * loops
    assert operator_bytes(op, types) == 4 * (types[0].size + types[1].size + op.results[0].type.size)


CONVOLUTIONS = {
    "plain": ((2, 9, 9, 6), (3, 3, 6, 8), {}),
    "strided": ((2, 9, 9, 6), (3, 2, 6, 8), {"window_strides": (2, 2)}),
    "grouped": ((2, 9, 9, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "depthwise": ((2, 9, 9, 6), (3, 3, 1, 6), {"feature_group_count": 6}),
    "batch groups": ((4, 9, 9, 6), (3, 3, 6, 8), {"batch_group_count": 2}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_count_as_in_xla(case):
    left, right, options = CONVOLUTIONS[case]
    options = {"window_strides": (1, 1), **options}

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    op, types = _operator(convolve, left, right)
    assert operator_flops(op, types) == _xla_flops(convolve, left, right) > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: jnp.maximum(x, y),
        lambda x, _: -x,
        lambda x, _: lax.reduce_sum(x, (0,)),
        lambda x, _: lax.reduce_max(x, (0, 1)),
        lambda x, _: x.reshape(35),
        lambda x, _: x.T,
    ],
)
def test_elementwise_operators_and_reductions_count_nearly_as_in_xla(function):
    op, types = _operator(function, (5, 7), (5, 7))
    assert operator_flops(op, types) == pytest.approx(_xla_flops(function, (5, 7), (5, 7)), abs=7)  # n - 1 additions


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x, y: lax.exp(x), 20),
        (lambda x, y: lax.cumsum(x), 20),
        (lambda x, y: lax.argmax(x, 0, jnp.int32), 20),
        (lambda x, y: lax.select(x > 0, x, y), 20),
        (lambda x, y: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"), 12 * 4),
        (lambda x, y: lax.broadcast_in_dim(x, (3, 4, 5), (1, 2)), 0),
        (lambda x, y: lax.concatenate([x, y], 0), 0),
        (lambda x, y: x.at[0].set(1.0), 0),
        (lambda x, y: x.at[0].add(1.0), 5),
    ],
)
def test_flops_written_out(function, flops):
    op, types = _operator(function, (4, 5), (4, 5))
    assert operator_flops(op, types) == flops


@pytest.mark.skipif(not hasattr(lax, "polynomial"), reason="this jax writes polynomials out")
def test_a_polynomial_counts_a_product_and_a_sum_for_each_power():
    op, types = _operator(lambda x, y: lax.polynomial(x, [1.0, y, 3.0]), (4, 5), (4, 5))
    assert operator_flops(op, types) == 2 * 2 * 20


def test_ragged_dot_counts_each_row_once():
    groups = jnp.array([1, 2, 3], jnp.int32)
    op, types = _operator(lambda x, w: lax.ragged_dot(x, w, groups), (6, 4), (3, 4, 5))
    assert operator_flops(op, types) == 2 * 6 * 4 * 5


@pytest.mark.parametrize(
    ("function", "moved"),
    [
        (lambda x: x * x, 2 * 80),  # one read, one write
        (lambda x: x + 1.0, 2 * 80 + 4),
        (lambda x: x.reshape(20), 0),
        (lambda x: lax.slice(x, (0, 0), (1, 5)), 2 * 20),
        (lambda x: lax.dynamic_update_slice(x, jnp.ones((1, 5)), (0, 0)), 2 * 20 + 2 * 4),
    ],
)
def test_bytes_written_out(function, moved):
    op, types = _operator(function, (4, 5))
    assert operator_bytes(op, types) == moved


def test_operators_with_regions_leave_it_to_them():
    t = TensorType((8,), "f32")
    op = Operator("scan", "scan", ("a",), (Value("b", t),), regions=(("body", Graph("body", (), ())),))
    assert operator_flops(op, (t,)) == operator_bytes(op, (t,)) == 0


def _device(**changes):
    figures = {"kind": "D", "memory_bytes": 10**9, "memory_bandwidth": 1e11, "peak_flops": {"f32": 1e12, "bf16": 4e12}}
    return Device(**{**figures, **changes})


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.sampled_from(["f32", "bf16", "i32"]))
def test_roofline(flops, moved, dtype):
    device = _device(compute_efficiency=Curve.constant(0.5), memory_efficiency=Curve.constant(0.8))
    peak = 4e12 if dtype == "bf16" else 1e12
    expected = max(flops / (peak * 0.5), moved / (1e11 * 0.8))
    assert roofline_s(flops, moved, dtype, device) == pytest.approx(expected)


@given(st.floats(0, 1e15), st.floats(0, 1e15))
def test_small_operators_reach_less(a, b):
    device = _device(compute_efficiency=Curve(((1e6, 0.1), (1e12, 0.9))))
    low, high = sorted((a, b))
    assert roofline_s(low, 0, "f32", device) <= roofline_s(high, 0, "f32", device) * (1 + 1e-9)
    assert roofline_s(1e6, 0, "f32", device) == pytest.approx(1e6 / (1e12 * 0.1))
    assert roofline_s(1e13, 0, "f32", device) == pytest.approx(1e13 / (1e12 * 0.9))


def test_the_model_waits_for_the_slowest_device_and_adds_the_launch():
    link = LinkSpec(1e9, 1e-6)
    fast, slow = _device(launch_s=1e-6), _device(kind="S", peak_flops={"f32": 1e11}, launch_s=3e-6)
    mixed = Cluster("m", (NodeGroup(1, 1, fast, link, link), NodeGroup(1, 1, slow, link, link)))
    uniform = Cluster("u", (NodeGroup(2, 1, fast, link, link),))
    assert CostModel(uniform).operator_s(1e9, 0, "f32") == pytest.approx(1e-3 + 1e-6)
    assert CostModel(mixed).operator_s(1e9, 0, "f32") == pytest.approx(1e-2 + 3e-6)
    assert CostModel(mixed, launch_s=0.0).operator_s(1e9, 0, "f32") == pytest.approx(1e-2)
    assert CostModel(mixed).operator_s(0, 0, "f32") == 0
    assert CostModel(mixed).operator_s(0, 8, "f32") > 3e-6
    assert hash(CostModel(mixed)) == hash(CostModel(mixed))
