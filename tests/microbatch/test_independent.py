"""Examples that are independent run in microbatches, however the step is written; what mixes them says why."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar import MicrobatchError
from autopar.microbatch import analyze
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same
from tests.microbatch.running import assert_same_in_microbatches, step_of, traced

W = np.random.default_rng(0).standard_normal((6, 6), np.float32)
X = np.random.default_rng(1).standard_normal((16, 6), np.float32)


def mapped(p, x):
    return jnp.mean(lax.map(lambda e: jnp.sum(jnp.tanh(e @ p) ** 2), x))


def mapped_in_batches(p, x):
    return jnp.mean(lax.map(lambda e: jnp.sum(jnp.tanh(e @ p) ** 2), x, batch_size=2))


def in_chunks(p, x):
    def body(total, chunk):
        return total + jnp.mean(jnp.tanh(chunk @ p) ** 2), jnp.tanh(chunk @ p)

    total, made = lax.scan(body, jnp.float32(1), x.reshape(8, 2, 6))
    return total / 8 + jnp.mean(made**2)


def in_chunks_recomputed(p, x):
    body = jax.checkpoint(lambda total, chunk: (total + jnp.mean(jnp.tanh(chunk @ p) ** 2), None))
    return lax.scan(body, jnp.float32(0), x.reshape(8, 2, 6))[0] / 8


def from_the_last(p, x):
    return lax.scan(lambda t, e: (t + jnp.tanh(e @ p).sum(), None), jnp.float32(0), x, reverse=True)[0]


def numbered(p, x):
    weights = jnp.arange(16.0)
    return lax.scan(lambda t, e: (t + e[1] * jnp.tanh(e[0] @ p).sum(), None), 0.0, (x, weights))[0]


def nested(p, x):
    def body(total, e):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), e, jnp.stack([p, p]))
        return lax.cond(total.sum() > -1, lambda: total, lambda: total) * 0 + h.sum(), None

    return jnp.mean(jax.vmap(lambda e: body(jnp.zeros(2), e)[0])(x)) + in_chunks(p, x)


def branches(p, x):
    h = lax.cond(p[0, 0] > 0, lambda h: jnp.tanh(h @ p), lambda h: jnp.sin(h) * p[0], x)
    return jnp.mean(h**2)


@pytest.mark.parametrize(
    "loss",
    [mapped, mapped_in_batches, in_chunks, in_chunks_recomputed, from_the_last, numbered, nested, branches],
    ids=lambda f: f.__name__,
)
def test_loops_over_examples(loss):
    assert_same_in_microbatches(step_of(loss), (W, X), (2, 4), rtol=1e-5)


@pytest.mark.slow
def test_gradients_accumulated_by_the_user():
    def step(p, x):
        def body(sums, chunk):
            value, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(chunk @ p) ** 2))(p)
            return (sums[0] + value, sums[1] + g), None

        (value, g), _ = lax.scan(body, (jnp.float32(0), jnp.zeros_like(p)), x.reshape(8, 2, 6))
        return p - 0.1 * g / 8, value / 8

    plain = assert_same_in_microbatches(step, (W, X), (2, 4), rtol=1e-5)
    found = analyze(plain.graph, 4)
    assert any(id.startswith("scan") for id in found.body)


def test_each_example_is_seen_once():
    plain, _ = traced(step_of(mapped), (W, X))
    found = analyze(plain.graph, 4)
    scans = [op for op in plain.graph.operators if op.primitive == "scan"]
    assert {op.id for op in scans} <= set(found.body)
    for op in scans:
        assert any(k is not None and k.dims and k.dims[0] for k in found.operands[op.id])


@pytest.mark.slow
def test_a_loop_over_examples_on_devices():
    step = step_of(mapped)
    got = autopar.parallelize(step, cluster=CLUSTER, num_microbatches=4)(W, X)
    assert_trees_same(got, step(W, X))


@pytest.mark.slow
def test_gradients_of_each_example():
    def step(p, x):
        def loss(p, e):
            h = lax.conv_general_dilated(e[None], p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.sum(jax.nn.relu(h).reshape(-1) @ p["w"])

        g = jax.vmap(jax.grad(loss), (None, 0))(p, x)
        norms = jnp.sqrt(sum(jnp.sum(v.reshape(v.shape[0], -1) ** 2, -1) for v in jax.tree.leaves(g)))
        clipped = jax.tree.map(lambda v: jnp.einsum("b,b...->...", 1 / jnp.maximum(1.0, norms), v), g)
        return jax.tree.map(lambda a, v: a - 0.1 * v, p, clipped)

    p = {"k": jnp.ones((3, 3, 2, 4)), "w": jnp.ones((64, 3))}
    x = np.random.default_rng(2).standard_normal((8, 4, 4, 2), np.float32)
    assert_same_in_microbatches(step, (p, x), (2, 4), rtol=1e-5)


def test_a_permutation_among_devices_that_share_the_features():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    P = PartitionSpec

    def loss(p, x):
        def inner(p, x):
            return lax.ppermute(jnp.tanh(x @ p), "d", [(0, 1), (1, 0)])

        permuted = jax.shard_map(inner, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(None, "d"))
        return jnp.mean(permuted(p, x) ** 2)

    assert_same_in_microbatches(step_of(loss), (W, X), (2, 4), rtol=1e-5)


# -- what mixes examples ------------------------------------------------------------------------------


def running_mean(p, x):
    def body(mean, e):
        mean = 0.9 * mean + 0.1 * jnp.tanh(e @ p)
        return mean, jnp.sum((e - mean) ** 2)

    return jnp.mean(lax.scan(body, jnp.zeros(6), x)[1])


def called_back(p, x):
    h = jnp.tanh(x @ p)
    made = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h))
    return jnp.mean((h * made) ** 2)


def kernel(p, x):
    def body(a, o):
        o[...] = a[...] * 2

    h = jnp.tanh(x @ p)
    made = pl.pallas_call(body, jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)(lax.stop_gradient(h))
    return jnp.mean((h * made) ** 2)


def shifted(p, x):
    h = jnp.tanh(x @ p)
    return jnp.mean((h - jnp.roll(h, 1, 0)) ** 2)


@pytest.mark.parametrize(
    ("loss", "cause", "remedy"),
    [
        (running_mean, "a loop that carries more than sums", "jax.vmap"),
        (called_back, "pure_callback calls a Python function", "jax operators in its place"),
        (kernel, "pallas_call has no sharding rule", r'register_rule\("pallas_call"'),
        (shifted, "regrouped, shifted", "num_microbatches=1"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_cause_by_primitive(loss, cause, remedy):
    plain, _ = traced(step_of(loss), (W, X))
    with pytest.raises(MicrobatchError, match=f"(?s){cause}.*{remedy}") as error:
        analyze(plain.graph, 4)
    assert "batch norm" not in str(error.value)


def cut_by_a_counter(p, x):
    def body(i, total):
        return total + jnp.mean(jnp.tanh(lax.dynamic_slice(x, (i * 4, 0), (4, 6)) @ p) ** 2)

    return lax.fori_loop(0, 4, body, jnp.float32(0)) / 4


def divided_by_a_sum_of_the_loop(p, x):
    def body(sums, chunk):
        return (sums[0] + jnp.sum(jnp.tanh(chunk @ p) ** 2), sums[1] + jnp.sum(chunk > 0)), None

    (total, count), _ = lax.scan(body, (jnp.float32(0), jnp.int32(0)), x.reshape(8, 2, 6))
    return total / count


def a_mesh_inside_of_a_loop(p, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    P = PartitionSpec

    def inner(w, h):
        return lax.ppermute(jnp.tanh(h @ w), "d", [(0, 1), (1, 0)])

    layer = jax.shard_map(inner, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(None, "d"))
    return jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, jnp.stack([p, p]))[0] ** 2)


@pytest.mark.parametrize(
    "loss", [cut_by_a_counter, divided_by_a_sum_of_the_loop, a_mesh_inside_of_a_loop], ids=lambda f: f.__name__
)
def test_what_is_not_done(loss):
    """As docs/pipelines.md says; a test that fails here is a line less there."""
    plain, _ = traced(step_of(loss), (W, X))
    with pytest.raises(MicrobatchError, match="num_microbatches=1"):
        analyze(plain.graph, 4)


def test_examples_indexed_with_a_range():
    labels = np.arange(16) % 6

    def loss(p, x):
        return -jnp.mean(jax.nn.log_softmax(x["x"] @ p)[jnp.arange(16), x["y"]])

    assert_same_in_microbatches(step_of(loss), (W, {"x": X, "y": labels}), (2, 4), rtol=1e-5)


def test_a_line_of_a_library_comes_with_the_users_own():
    linen = pytest.importorskip("flax.linen")
    model = linen.Sequential([linen.Dense(6), linen.BatchNorm(use_running_average=False)])

    def loss(p, x):
        made, _ = model.apply(p, x, mutable=["batch_stats"])
        return jnp.mean(made**2 * x)

    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), X))
    plain, _ = traced(lambda p, x: jax.grad(loss)(p, x), (variables, X))
    lines, first = inspect.getsourcelines(loss)
    line = first + next(n for n, text in enumerate(lines) if "model.apply" in text)
    with pytest.raises(MicrobatchError, match=rf"normalization\.py:.*, from test_independent\.py:{line} "):
        analyze(plain.graph, 4)


def test_a_callback_is_told_in_the_plan():
    plan = autopar.parallelize(step_of(called_back), cluster=CLUSTER, num_stages=1).plan(W, X)
    (note,) = [n for n in plan.notes if "pure_callback" in n]
    assert "runs on one device" in note and "test_independent.py" in note


def test_what_takes_all_of_the_batch_is_computed_again_before_the_loop(x64):
    """Factors of one matrix are split as the batch is: their product needs all pieces, and recomputation asks again."""

    def step(x, a, b):
        def loss(q, a):
            return jnp.sum(jnp.sin(q @ a)) + jnp.sum(jnp.sin(q @ b)) + jnp.sum(jnp.sin(jnp.expm1(jnp.tanh(a))))

        return jax.vmap(lambda q: jax.value_and_grad(loss, (0, 1))(q, a))(x)

    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal(s)) for s in ((8, 8, 12), (12, 3), (12, 16)))
    for remat in ("none", "full"):
        options = {"num_stages": 1, "num_microbatches": 2, "remat": remat}
        planned = autopar.parallelize(step, cluster=CLUSTER, batch_argnums=(0, 1, 2), **options).compile(*args)
        assert planned.plan.num_microbatches == 2
        assert_trees_same(planned(*args), jax.jit(step)(*args))
