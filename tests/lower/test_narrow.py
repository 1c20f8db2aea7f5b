"""Gathers and sums in narrow formats: values within their bounds, bytes as predicted."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar.cost import wire_bytes
from autopar.ir import Layout, TensorType
from autopar.ir.formats import WireFormat
from autopar.lower.hlo import collectives
from autopar.lower.reshard import apply_steps
from autopar.precision.wire import WIRE_FORMATS
from autopar.sharding.paths import messages
from autopar.sharding.reshard import PathTables, ReshardStep, communication
from autopar.transforms import Format
from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.random_plans import random_plan
from tests.sharding.pieces import logical_mesh

GROUP = 8
SHAPE = (16, 24)  # a shard, of which nothing is a multiple of a block of 256
TENSORS = 200


@functools.cache
def stepped(step: ReshardStep):
    """Compiled: ``[GROUP, *SHAPE]`` before the step, a shard a device, to the shards after it."""
    mesh = logical_mesh(GROUP)
    axis = PartitionSpec(mesh.names[0])
    devices = jax.make_mesh((GROUP,), mesh.names, axis_types=(AxisType.Auto,))
    local = jax.shard_map(
        lambda a: apply_steps((step,), a[0], mesh)[None], mesh=devices, in_specs=axis, out_specs=axis, check_vma=False
    )
    return jax.jit(local).lower(jax.ShapeDtypeStruct((GROUP, *SHAPE), jnp.float32)).compile()


def step_of(kind: str, name: str) -> ReshardStep:
    return ReshardStep(kind, ("x",), -1 if kind == "all-reduce" else 1, wire=WireFormat(name).text)


def exact(kind: str, shards: np.ndarray) -> np.ndarray:
    """Shards after the step."""
    if kind == "all-gather":
        return np.broadcast_to(np.concatenate(list(shards), axis=1), (GROUP, SHAPE[0], GROUP * SHAPE[1]))
    total = shards.sum(axis=0)
    if kind == "all-reduce":
        return np.broadcast_to(total, (GROUP, *SHAPE))
    return np.stack(np.split(total, GROUP, axis=1))


def bounds(kind: str, format: Format, shards: np.ndarray) -> np.ndarray:
    """The largest error of each element after the step, from the bounds of what is encoded, in its order."""
    if kind == "all-gather":
        rows = np.stack([np.asarray(format.bound(s.reshape(-1))).reshape(SHAPE) for s in shards])
        return np.concatenate(list(rows), axis=1)
    if kind == "reduce-scatter":
        parts = np.stack([np.stack(np.split(s, GROUP, axis=1)).reshape(GROUP, -1) for s in shards])
        terms = np.asarray(format.bound(parts)).sum(axis=0)
        return terms.reshape(GROUP, SHAPE[0], SHAPE[1] // GROUP)
    rows = shards.reshape(GROUP, GROUP, -1)
    terms = np.asarray(format.bound(rows)).sum(axis=0)
    result = np.asarray(format.bound(shards.sum(axis=0).reshape(GROUP, -1))) + np.asarray(format.bound(terms))
    return (terms + result).reshape(SHAPE)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_errors_of_random_tensors_are_within_their_bounds(kind, name):
    run = stepped(step_of(kind, name))
    largest = 0.0
    for seed in range(TENSORS // 3):
        rng = np.random.default_rng(seed)
        shards = (rng.standard_normal((GROUP, *SHAPE)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        error = np.abs(np.asarray(run(shards), np.float64) - exact(kind, shards.astype(np.float64)))
        scale = np.abs(shards).max()
        assert np.all(error <= bounds(kind, Format(name), shards) + 1e-6 * scale * GROUP), (kind, name, seed)
        largest = max(largest, float(error.max() / scale))
    assert largest > 1e-4  # what is sent is narrow


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_compiled_messages_have_the_predicted_bytes(kind, name):
    step = step_of(kind, name)
    mesh, text = logical_mesh(GROUP), stepped(step).as_text()
    before = {"all-gather": "[.,x]"}.get(kind, "[.,.]+sum(x)")
    whole = (SHAPE[0], SHAPE[1] * GROUP) if kind == "all-gather" else SHAPE
    predicted = communication(step, TensorType(whole, "f32"), Layout.parse(before), mesh)
    compiled = sorted((c.kind, c.full_bytes) for c in collectives(text))
    assert compiled == sorted((k, full) for k, full, _ in predicted)
    assert {"u8"} == {c.dtype for c in collectives(text)}
    assert len(predicted) == (2 if kind == "all-reduce" else 1)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 32 / 256), ("int4", 4 + 32 / 256), ("bf16", 16)])
def test_a_gather_sends_q_and_32_over_b_bits_an_element(name, bits):
    elements = 256 * 40
    ((_, full),) = messages("all-gather", elements, GROUP, WireFormat(name))
    assert full == GROUP * elements * bits / 8


def test_whole_numbers_below_the_steps_of_the_format_are_exact():
    """A block whose largest number is 127 has whole steps."""
    shards = np.random.default_rng(0).integers(-127, 128, (GROUP, *SHAPE)).astype(np.float32)
    shards[:, :, ::3] = 127.0  # one element of each part
    got = stepped(step_of("reduce-scatter", "int8"))(shards)
    np.testing.assert_allclose(got, exact("reduce-scatter", shards), atol=1e-3)


def test_prices_choose_between_formats_by_bandwidth():
    """Over slow links codes are cheaper than floats; with a slow memory and fast links floats are."""
    mesh, type = logical_mesh(GROUP), TensorType((1024, 1024), "f32")
    source, target = Layout.parse("[.,.]+sum(x)"), Layout.parse("[x,.]")
    for link, memory, narrow in ((1e9, 1e12, True), (1e12, 1e9, False)):
        table = PathTables(
            mesh, lambda kind, n, axes, s=link: wire_bytes(kind, n, GROUP) / s, rearrange=lambda n, s=memory: n / s
        )
        wide_s, narrow_s = (t.seconds(type, source, target) for t in (table, table.sending("int8/256")))
        assert (narrow_s < wide_s) == narrow


def test_paths_of_a_format_name_it_in_gathers_and_sums_alone():
    mesh, type = logical_mesh(2, 4), TensorType((64, 64), "f32")
    table = PathTables(mesh, lambda kind, n, axes: n * 1e-9).sending("int4/256")
    steps = table.path(type, Layout.parse("[x,.]+sum(y)"), Layout.parse("[.,x+y]"))
    assert {s.kind for s in steps} > {"all-to-all"} or len(steps) > 1
    assert all(bool(s.wire) == (s.kind in ("all-gather", "reduce-scatter", "all-reduce")) for s in steps)
    assert math.isfinite(table.seconds(type, Layout.parse("[x,.]+sum(y)"), Layout.parse("[.,x+y]")))


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2])
def test_integers_of_two_bits_go_through_plans(dtype):
    """Collectives, loops that wait for collectives, and sums over devices."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 16)), dtype)

    def step(x):
        return jnp.cumsum(x, 0), x.max(0), lax.reduce(x, dtype(0), lax.add, (0,)), x + x

    want = jax.jit(step)(x)
    for seed in range(2):
        options = {"cluster": MIDDLE, "mesh_shape": (2, 4), "search": random_plan(seed), "num_stages": 1}
        for got, plain in zip(autopar.parallelize(step, **options)(x), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).astype(int), np.asarray(plain).astype(int))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2, jnp.int4, jnp.uint4])
def test_products_of_integers_that_share_a_byte(dtype):
    """Their rows are aligned by bits: an element has no whole byte."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 6, 5)), dtype)

    def step(x):
        return lax.dot_general(x, x[0], (((2,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    np.testing.assert_array_equal(autopar.parallelize(step, cluster=MIDDLE)(x), jax.jit(step)(x))
