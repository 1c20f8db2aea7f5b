"""Scaled losses: what float16 loses without them, what an overflow does, and what powers of two leave as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.transforms import loss_scaled


def weights(width=16):
    keys = jax.random.split(jax.random.key(0), 2)
    return {n: jax.random.normal(k, (width, width)) / width**0.5 for n, k in zip("ab", keys, strict=True)}


def data(size=8, width=16):
    keys = jax.random.split(jax.random.key(1), 2)
    return {n: jax.random.normal(k, (size, width)) for n, k in zip("xy", keys, strict=True)}


def step_with(factor=1.0, rate=0.5):
    """An Adam step; the loss is multiplied by ``factor``. Metrics: the loss and the gradients."""
    tx = optax.adam(rate)

    def loss(p, d):
        return factor * jnp.mean((jnp.tanh(d["x"] @ p["a"]) @ p["b"] - d["y"]) ** 2)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, (value, grads)

    return step, {"params": weights(), "opt": tx.init(weights())}


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-3])
def test_powers_of_two_leave_gradients_as_they_are_to_the_bit(scale):
    step, state = step_with()
    want = jax.jit(step)(state, data())
    scaled = loss_scaled(step, scale=scale)
    got = jax.jit(scaled)(scaled.init(state), data())
    jax.tree.map(np.testing.assert_array_equal, (got[0].state, got[1]), want)
    assert (float(got[0].scale), int(got[0].good_steps), int(got[0].skipped)) == (scale, 1, 0)


def small(state, batch):
    """The gradient of ``w`` is 2^-27, by way of a product."""

    def loss(p):
        return jnp.sum((batch["x"] @ p["v"]) @ p["w"]) * 2.0**-27

    grads = jax.grad(loss)(state)
    return jax.tree.map(lambda w, g: w - g, state, grads), grads


@pytest.mark.slow
def test_a_gradient_of_2_to_the_minus_27_is_lost_at_1_and_kept_at_2_to_the_15():
    state = {"v": jnp.eye(8), "w": jnp.zeros((8, 8))}
    batch = {"x": jnp.eye(8)}
    kept = {}
    for scale in (1.0, 2.0**15):
        scaled = loss_scaled(small, scale=scale)
        run = autopar.parallelize(scaled, precision="f16", num_stages=1, num_microbatches=1)
        kept[scale] = np.asarray(run(scaled.init(state), batch)[1]["w"])
    assert np.all(kept[1.0] == 0) and np.all(kept[2.0**15] == 2.0**-27)


def test_an_infinity_skips_one_update_and_halves_the_scale():
    step, state = step_with()
    scaled = loss_scaled(step, scale=8.0, interval=2)
    run = jax.jit(scaled)
    bad = {**data(), "y": data()["y"].at[0, 0].set(jnp.inf)}
    before = run(scaled.init(state), data())[0]
    after, _ = run(before, bad)
    jax.tree.map(np.testing.assert_array_equal, after.state, before.state)
    assert (float(after.scale), int(after.good_steps), int(after.skipped)) == (4.0, 0, 1)
    once, _ = run(after, data())
    twice, _ = run(once, data())
    assert (float(once.scale), float(twice.scale), int(twice.good_steps)) == (4.0, 8.0, 0)
    plain, _ = jax.jit(step)(jax.jit(step)(state, data())[0], data())
    np.testing.assert_allclose(once.state["params"]["a"], plain["params"]["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_overflow_in_float16_finds_its_scale_and_trains():
    step, state = step_with(factor=2.0**9)
    scaled = loss_scaled(step, scale=2.0**24)
    run = autopar.parallelize(scaled, precision="f16", num_stages=1, num_microbatches=1)
    current, losses = scaled.init(state), []
    for _ in range(24):
        current, (value, _) = run(current, data())
        losses.append(float(value))
    assert int(current.skipped) > 0 and float(current.scale) == 2.0 ** (24 - int(current.skipped))
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_checkpoints_hold_the_scale(tmp_path):
    step, state = step_with()
    scaled = loss_scaled(step, scale=32.0)
    run = autopar.parallelize(scaled, precision="f16", num_stages=1, num_microbatches=1)
    bad = {**data(), "y": data()["y"].at[0, 0].set(jnp.inf)}
    current, _ = run(scaled.init(state), bad)
    run.save(str(tmp_path / "state"), current, wait=True)
    again = run.restore(str(tmp_path / "state"), like=current)
    assert (float(again.scale), int(again.skipped)) == (16.0, 1)


def test_what_cannot_be_scaled_is_refused():
    def looped(state, batch):
        def body(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), None

        return jax.lax.scan(body, state, batch)[0]

    with pytest.raises(TraceError, match="begins with the cotangent 1"):
        scaled = loss_scaled(looped)
        scaled(scaled.init(jnp.eye(3)), jnp.ones((2, 4, 3)))
    with pytest.raises(AutoparError, match="not a power of two"):
        loss_scaled(looped, scale=3.0)
