"""Gradients in fewer bytes: PowerSGD, 1-bit Adam and narrow formats against their identities and bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.errors import AutoparError
from autopar.transforms import FORMATS, Format, mean_over_replicas, one_bit_adam, powersgd

SHAPES = {"a": (6, 10), "b": (10, 4), "c": (3, 2, 5), "v": (7,), "s": ()}


def parameters(dtype=jnp.float64):
    return {n: jnp.zeros(s, dtype) for n, s in SHAPES.items()}


def gradients(seed, replicas=4):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.standard_normal((replicas, *s))) for n, s in SHAPES.items()}


def mean(grads):
    return jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)


def assert_close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


class Exact:
    """No compression."""

    def encode(self, x, valid):
        return x * valid

    def decode(self, sent, valid):
        return sent

    def value(self, x, valid):
        return x * valid


def test_powersgd_of_full_rank_is_data_parallel(x64):
    tx = powersgd(10, 4, min_compression=0)
    state = tx.init(parameters())
    for seed in range(3):
        sent, state = tx.update(gradients(seed), state)
        assert_close(sent, mean(gradients(seed)), 1e-10)


def test_powersgd_is_exact_for_gradients_of_its_rank(x64):
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((12, 2)), rng.standard_normal((2, 9))
    grads = jnp.asarray(left @ rng.standard_normal((4, 2, 2)) @ right)
    tx = powersgd(2, 4, min_compression=0)
    sent, state = tx.update(grads, tx.init(jnp.zeros((12, 9))))
    assert_close(sent, jnp.mean(grads, axis=0), 1e-10)
    # Each replica keeps how it differs from the mean; over the replicas that is nothing.
    assert_close(jnp.mean(state.errors[0], axis=0), jnp.zeros((12, 9)), 1e-10)


def test_what_powersgd_sent_and_what_is_left_are_all_gradients(x64):
    tx = powersgd(1, 4, min_compression=0)
    state, step = tx.init(parameters()), jax.jit(tx.update)
    sent, wanted = parameters(), parameters()
    for seed in range(5):
        update, state = step(gradients(seed), state)
        sent = jax.tree.map(jnp.add, sent, update)
        wanted = jax.tree.map(jnp.add, wanted, mean(gradients(seed)))
        for (name, total), error in zip(sorted(sent.items()), state.errors, strict=True):
            left = jnp.mean(error, axis=0) if error.size else 0.0
            assert_close(total + left, wanted[name], 1e-10)
    assert not np.allclose(sent["a"], wanted["a"])


@pytest.mark.slow
def test_powersgd_sends_small_ones_whole(x64):
    tx = powersgd(2, 4)
    state = tx.init({"large": jnp.zeros((64, 64)), "small": jnp.zeros((4, 4)), "vector": jnp.zeros(64)})
    assert [f.shape for f in state.factors] == [(64, 2), (0, 0), (0, 0)]
    assert [e.shape for e in state.errors] == [(4, 64, 64), (0,), (0,)]


@pytest.mark.parametrize("bias_correction", [True, False])
def test_one_bit_adam_without_compression_is_adam_with_a_frozen_variance(x64, bias_correction):
    tx = one_bit_adam(0.1, 4, 3, bias_correction=bias_correction, compression=Exact())
    state, (m, v) = tx.init(parameters()), (parameters(), parameters())
    step = jax.jit(tx.update)
    for t in range(1, 7):
        updates, state = step(gradients(t), state)
        g = mean(gradients(t))
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        if t <= 3:
            v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
        c1, c2 = (1 - 0.9**t, 1 - 0.999 ** min(t, 3)) if bias_correction else (1, 1)
        assert_close(updates, jax.tree.map(lambda a, b: -0.1 * (a / c1) / (jnp.sqrt(b / c2) + 1e-8), m, v), 1e-12)  # noqa: B023


def test_one_bit_adam_warms_up_as_adam(x64):
    ours, theirs = one_bit_adam(0.1, 4, 5, bias_correction=True), optax.adam(0.1)
    a, b = ours.init(parameters()), theirs.init(parameters())
    for t in range(5):
        mine, a = jax.jit(ours.update)(gradients(t), a)
        other, b = theirs.update(mean(gradients(t)), b)
        assert_close(mine, other, 1e-12)


@pytest.mark.slow
def test_what_one_bit_adam_sent_and_what_is_left_is_all_momentum(x64):
    """Error feedback on both sides: with a momentum of no memory the sum of what was applied and of what is left."""
    tx = one_bit_adam(1.0, 4, 1, b1=0.0, b2=0.0, eps=0.0)
    state = tx.init(parameters())
    step = jax.jit(tx.update)
    _, state = step(gradients(0), state)
    applied, wanted = parameters(), parameters()
    for t in range(1, 6):
        _, state = step(gradients(t), state)
        momentum = dict(zip(sorted(SHAPES), state.momentum, strict=True))
        applied = jax.tree.map(jnp.add, applied, momentum)
        wanted = jax.tree.map(jnp.add, wanted, mean(gradients(t)))
        for name, error, server in zip(sorted(SHAPES), state.errors, state.server_errors, strict=True):
            left = (jnp.mean(error, axis=0) + server).reshape(-1)
            total = applied[name].reshape(-1) + left[: applied[name].size]
            assert_close(total, wanted[name].reshape(-1), 1e-10)
            assert not np.any(left[applied[name].size :])  # what fills the last chunk carries nothing
    signs = np.unique(np.sign(np.asarray(state.momentum[0])))
    assert set(signs) == {-1.0, 1.0}


def test_gradients_without_replicas_are_refused():
    for tx in (powersgd(1, 4), one_bit_adam(0.1, 4, 1)):
        with pytest.raises(AutoparError, match="no leading dim of 4 replicas"):
            tx.update(jnp.zeros((3, 5)), tx.init(jnp.zeros((3, 5))))
    with pytest.raises(AutoparError, match="rank=0"):
        powersgd(0, 4)
    with pytest.raises(AutoparError, match="warmup_steps=0"):
        one_bit_adam(0.1, 4, 0)


@pytest.mark.parametrize("block", [8, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_error_is_within_its_bound(name, block):
    """1,000 tensors in all, of sizes from e^-9 to e^9; a ten thousandth of it for the rounding of float32."""
    rng = np.random.default_rng(FORMATS.index(name))
    x = rng.standard_normal((84, 300)) * np.exp(rng.uniform(-9, 9, (84, 300 // 4))).repeat(4, axis=1)
    x = jnp.asarray(x, jnp.float32)
    narrow = Format(name, block)
    rounded, bound = jax.jit(lambda x: (narrow.rounded(x), narrow.bound(x)))(x)
    error = np.abs(np.asarray(rounded) - np.asarray(x))
    assert np.all(error <= np.asarray(bound) * (1 + 1e-4))
    assert np.all(error.max(axis=1) > 0)


@pytest.mark.slow
def test_what_a_format_holds_is_exact():
    x = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (3, 40)), jnp.float32).at[:, ::8].set(7.0)
    for name in ("int8", "int4"):
        narrow = Format(name, 8)
        scaled = x * (127.0 / 7 if name == "int8" else 1.0)
        np.testing.assert_array_equal(narrow.rounded(scaled), scaled) if name == "int4" else None
        np.testing.assert_array_equal(narrow.rounded(jnp.zeros((3, 40))), jnp.zeros((3, 40)))
    np.testing.assert_array_equal(Format("sign", 8).rounded(jnp.full((2, 16), -3.0)), jnp.full((2, 16), -3.0))


@pytest.mark.slow
def test_rounding_at_random_has_the_right_mean():
    x = jnp.full((1, 64), 0.3).at[0, 0].set(7.0)  # a step is 1
    drawn = [Format("int4", 64).rounded(x, jax.random.key(s)) for s in range(40)]
    assert {float(v) for d in drawn for v in np.asarray(d)[0, 1:]} == {0.0, 1.0}
    assert abs(float(np.mean(np.asarray(drawn)[:, 0, 1:])) - 0.3) < 0.03


@pytest.mark.parametrize(
    ("name", "block", "codes", "bits"),
    [
        ("int8", 256, jnp.int8, 8.125),
        ("int4", 32, jnp.uint8, 5.0),
        ("sign", 512, jnp.uint8, 1.0625),
        ("f8_e4m3", 64, jnp.float8_e4m3fn, 8.5),
    ],
)
def test_bytes_are_those_of_the_formula(name, block, codes, bits):
    narrow = Format(name, block)
    encoded = jax.eval_shape(narrow.encode, jax.ShapeDtypeStruct((4, 1024), jnp.float32))
    assert encoded.codes.dtype == codes
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(encoded))
    assert held * 8 / 4096 == narrow.bits(1024) == bits


@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_quantized_mean_is_within_its_bound(name):
    """Two roundings: of the terms and of the result; the bound of the formula `max / (2 (2^(q-1) - 1))` for each."""
    x = np.random.default_rng(0).standard_normal((25, 4, 13, 7)).astype(np.float32)
    wanted = x.mean(axis=1)
    got = jax.jit(jax.vmap(lambda x: mean_over_replicas(x, name)))(jnp.asarray(x))
    steps = {"int8": 254, "int4": 14, "bf16": 256}[name]
    largest = np.abs(x).max(axis=(1, 2, 3), keepdims=True)[:, 0]
    assert np.all(np.abs(np.asarray(got) - wanted) <= largest * (2 + 1 / steps) / steps)


def test_unknown_formats_are_refused():
    with pytest.raises(AutoparError, match="'int3'"):
        Format("int3")
    with pytest.raises(AutoparError, match="block=12"):
        Format("int8", 12)
