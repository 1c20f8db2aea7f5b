"""Products in 8 bits, against numpy's rounding of the same tensors (ml_dtypes), and what delayed scales carry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.precision import Precision, delayed_scaling, mixed
from autopar.precision.eight_bits import BLOCK, COTANGENTS, VALUES, coded, rounded_in_blocks
from examples import gpt
from tests.precision.test_precision import dtypes, graph_of, parallel
from tests.precision.training import last_loss
from tests.versions import tolerance

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def arguments(rows=64, width=64, seed=0):
    rng = np.random.default_rng(seed)
    weights = {n: rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for n in "ab"}
    return weights, {n: rng.standard_normal((rows, width)).astype(np.float32) for n in "xy"}


def sgd(p, d):
    """Two products; the gradient of the mean of squares by hand is short."""

    def loss(p):
        return jnp.mean((jnp.tanh(d["x"] @ p["a"]) @ p["b"] - d["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), value


def one_scale(x, dtype, top, scale=None):
    scale = np.float32(top) / np.abs(x).max() if scale is None else scale
    return np.clip(x.astype(np.float32) * np.float32(scale), -top, top).astype(dtype).astype(np.float64) / scale


def values(x, scale=None):
    return one_scale(x, E4M3, 448.0, scale)


def cotangents(x):
    return one_scale(x, E5M2, 57344.0)


def bf16(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def by_hand(p, d, values=values, cotangents=cotangents):
    """The step of `sgd` in numpy: what products take is rounded by ``values`` and ``cotangents``."""
    hidden = bf16(np.tanh(bf16(values(d["x"]) @ values(p["a"]))))
    out = bf16(values(hidden) @ values(p["b"]))
    error = (2 * (out - d["y"]) / out.size).astype(np.float32)
    grad_b = values(hidden).T @ cotangents(error)
    down = bf16(cotangents(error) @ values(p["b"]).T)
    part = bf16(down * bf16(1 - hidden))  # (1 + h)(1 - h), as jax differentiates tanh
    grad_a = values(d["x"]).T @ cotangents(bf16(part + bf16(part * hidden)))
    return {"a": grad_a, "b": grad_b}


def gradients(step, p, d):
    after, _ = step(p, d)
    return {n: (p[n] - np.asarray(after[n])) / 0.5 for n in p}


def in_precision(name, p, d, compiled=jax.jit):
    closed, shape = jax.make_jaxpr(sgd, return_shape=True)(p, d)
    narrow = mixed(Precision(name), closed, [True, True, False, False])
    run = compiled(jax.extend.core.jaxpr_as_fun(narrow))
    return lambda *given: jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves(given)))


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(("format", "dtype"), [(VALUES, E4M3), (COTANGENTS, E5M2)])
def test_codes_are_those_of_ml_dtypes(format, dtype):
    x = np.random.default_rng(1).standard_normal((50, 40)).astype(np.float32) * 3
    scale = np.float32(format.top / np.abs(x).max())
    wanted = np.clip(x * scale, -format.top, format.top).astype(dtype)
    np.testing.assert_array_equal(np.asarray(coded(x, scale, format)).astype(np.float32), wanted.astype(np.float32))
    assert float(np.abs(np.asarray(coded(x, 1e9, format)).astype(np.float32)).max()) == format.top


def test_products_take_eight_bits():
    p, d = arguments()
    graph = graph_of(sgd, (p, d), Precision("f8"))
    products = [operands for operands, _ in dtypes(graph, "dot_general")]
    assert products.count(("f8_e4m3fn", "f8_e4m3fn")) == 2
    assert sum("f8_e5m2" in operands for operands in products) == 3 == len(products) - 2
    assert {t for operands in products for t in operands} == {"f8_e4m3fn", "f8_e5m2"}


def test_gradients_are_those_by_hand():
    p, d = arguments()
    # One operator at a time: XLA leaves out roundings to bfloat16 between operators that it joins, and codes turn.
    found, wanted = gradients(in_precision("f8", p, d, lambda run: run), p, d), by_hand(p, d)
    exact = gradients(jax.jit(sgd), p, d)
    for name in p:
        assert relative(found[name], wanted[name]) < tolerance(0.02, 0.01)  # codes that a sum in another order turns
        assert 0.005 < relative(found[name], exact[name]) < 0.1


@pytest.mark.slow
def test_blocks_have_scales_of_their_own():
    """A large element takes the small ones of its own block along the summed dim, and of no other."""
    x = np.random.default_rng(2).standard_normal((8, 4 * BLOCK)).astype(np.float32)
    x[:, 0] = 1e5
    blocks = x.reshape(8, 4, BLOCK)
    power = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(axis=2, keepdims=True))) - 8)
    wanted = np.clip(blocks / power, -448, 448).astype(E4M3).astype(np.float32) * power
    np.testing.assert_array_equal(np.asarray(rounded_in_blocks(x, 1), np.float32), wanted.reshape(x.shape))
    apart = np.abs(np.asarray(rounded_in_blocks(x, 1), np.float32) - x)
    assert apart[:, 1:BLOCK].max() > 0.2 and apart[:, BLOCK:].max() < 2.0**-4 * np.abs(x[:, BLOCK:]).max()
    assert not np.asarray(rounded_in_blocks(np.zeros((2, BLOCK), np.float32), 1), np.float32).any()


def test_blocks_keep_rows_that_one_scale_takes_to_zero():
    x = arguments()[1]["x"]
    x[1:] *= np.float32(1e-6)
    assert not values(x)[1:].any()
    assert relative(np.asarray(rounded_in_blocks(x, 1), np.float64)[1:], x[1:]) < 0.05


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["f8", "mxf8"])
def test_eight_devices_compute_what_one_does(name):
    p, d = arguments()
    found = gradients(autopar.parallelize(sgd, num_stages=1, num_microbatches=1, precision=name), p, d)
    wanted = gradients(in_precision(name, p, d), p, d)
    for n in p:
        assert relative(found[n], wanted[n]) < 0.03  # bf16 and codes that a sum in another order turns


@pytest.mark.slow
def test_delayed_scales_follow_the_largest_elements_of_earlier_steps():
    p, d = arguments()
    scaled = delayed_scaling(sgd, history=3)
    run, state = jax.jit(scaled), scaled.init(p, d)
    assert state.history.shape == (6, 3) and np.all(state.scales == 1)  # x, a, hidden, b, and two cotangents
    first, _ = run(state, d)
    tops = {448.0, 57344.0}
    assert set(np.round(first.scales * first.history[:, 0], -1).tolist()) == {round(t, -1) for t in tops}
    amax = {float(np.abs(v).max()) for v in (d["x"], p["a"], p["b"])}
    assert amax <= set(np.asarray(first.history[:, 0]).tolist())
    # The scales of the second step are those of the first one's tensors: a larger batch is cut off at the top.
    large = {**d, "x": 4 * d["x"]}
    second, _ = run(first, large)
    np.testing.assert_array_equal(second.history[:, 1], first.history[:, 0])
    number = int(np.argmin(np.abs(first.history[:, 0] - np.abs(d["x"]).max())))
    assert second.scales[number] == pytest.approx(448 / (4 * np.abs(d["x"]).max()))
    third, _ = run(second, {**d, "x": 0 * d["x"]})
    np.testing.assert_array_equal(third.history[number], [0, *second.history[number, :2]])


def test_a_scale_stays_where_nothing_finite_was_seen():
    p, d = arguments()
    scaled = delayed_scaling(sgd, history=1)
    state, _ = jax.jit(scaled)(scaled.init(p, d), d)
    after, _ = jax.jit(scaled)(state, {**d, "x": np.full_like(d["x"], np.inf)})
    assert np.all(np.isfinite(after.scales)) and np.any(after.scales == state.scales)


def test_rounds_of_a_loop_share_a_scale():
    rng = np.random.default_rng(3)
    stack = rng.standard_normal((3, 32, 32)).astype(np.float32) * np.array([1, 5, 2], np.float32)[:, None, None]

    def step(w, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), x, w)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    x = rng.standard_normal((8, 32)).astype(np.float32)
    scaled = delayed_scaling(step, history=2)
    state, _ = jax.jit(scaled)(scaled.init(stack, x), x)
    assert 4 <= state.scales.shape[0] <= 6  # not one for each round
    assert float(np.abs(stack).max()) in np.asarray(state.history[:, 0]).tolist()


@pytest.mark.slow
def test_delayed_scales_run_on_any_plan():
    p, d = arguments()
    scaled = delayed_scaling(sgd, history=4)
    state = jax.tree.map(np.asarray, scaled.init(p, d))
    run = autopar.parallelize(scaled, num_stages=1, num_microbatches=1)
    one, many = state, state
    for _ in range(2):
        one, _ = jax.jit(scaled)(one, d)
        many, _ = run(many, d)
    np.testing.assert_allclose(many.scales, one.scales, rtol=0.05)
    for n in p:
        assert relative(np.asarray(many.state[n]) - p[n], np.asarray(one.state[n]) - p[n]) < 0.05


def test_wrong_options_are_refused():
    with pytest.raises(AutoparError, match="no precision"):
        autopar.parallelize(sgd, precision="f4")
    with pytest.raises(AutoparError, match="history"):
        delayed_scaling(sgd, history=0)
    with pytest.raises(AutoparError, match="precision"):
        delayed_scaling(sgd, precision=Precision("bf16"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["f8", "mxf8"])
def test_300_steps_end_within_1_5_percent_of_float32(name):
    step, (first, batch) = gpt.build("tiny", dtype="float32")
    ends = [last_loss(parallel(step, precision=precision), first, batch) for precision in (None, name)]
    assert abs(ends[1] - ends[0]) <= 0.015 * max(ends[0], 0.1), ends
