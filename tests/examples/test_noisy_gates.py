"""Shazeer's noisy gates against loops in numpy, and what their losses do to the load."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples._noisy_gates import NoisyTopK, hierarchical, noisy_gate, noisy_top_k, squared_variation


def draw(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def softplus(x):
    return np.log1p(np.exp(x))


def slow(logits, noise, choices, eps):
    """Gates and load by the paper's words: keep the k greatest; P is of beating the k-th greatest of the others."""
    noisy = logits + eps * softplus(noise)
    gates, load = np.zeros_like(logits), np.zeros_like(logits)
    for place in np.ndindex(*logits.shape[:-1]):
        row = noisy[place]
        kept = sorted(range(len(row)), key=lambda e: -row[e])[:choices]
        total = sum(math.exp(row[e]) for e in kept)
        for e in range(len(row)):
            if e in kept:
                gates[(*place, e)] = math.exp(row[e]) / total
            others = sorted((row[o] for o in range(len(row)) if o != e), reverse=True)
            z = (logits[(*place, e)] - others[choices - 1]) / softplus(noise[(*place, e)])
            load[(*place, e)] = 0.5 * (1 + math.erf(z / math.sqrt(2)))
    return gates, load


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_gates_and_load_match_the_loop(x64, choices):
    logits, noise = draw((2, 6, 8), choices), draw((2, 6, 8), 10 + choices)
    key = jax.random.key(choices)
    for rng, eps in ((None, 0.0), (key, np.asarray(jax.random.normal(key, logits.shape, jnp.float64)))):
        got = noisy_top_k(jnp.asarray(logits), jnp.asarray(noise), choices, rng)
        gates, load = slow(logits, noise, choices, eps)
        np.testing.assert_allclose(got.gates, gates, atol=1e-12)
        np.testing.assert_allclose(got.load, load, atol=1e-12)


@pytest.mark.slow
def test_slots_give_the_mixture_that_the_gates_state(x64):
    """With room for all, experts on slots are ``sum_e G_e f_e(x)``; with less, first choices come first."""
    logits, x = jnp.asarray(draw((2, 6, 4), 0)), jnp.asarray(draw((2, 6, 3), 1))
    experts = jnp.asarray(draw((4, 3, 3), 2))
    routing = noisy_gate(logits, jnp.zeros_like(logits), 6, 2)
    inputs = jnp.einsum("gsec,gsm->egcm", routing.dispatch, x)
    mixed = jnp.einsum("gsec,egcm->gsm", routing.combine, jnp.einsum("egcm,emh->egch", inputs, experts))
    gates, _ = slow(np.asarray(logits), np.zeros(logits.shape), 2, 0.0)
    np.testing.assert_allclose(mixed, np.einsum("gse,gsm,emh->gsh", gates, x, experts), atol=1e-12)
    crowded = jnp.tile(jnp.array([3.0, 2.0, 1.0, 0.0]), (1, 4, 1))
    dispatch = noisy_gate(crowded, jnp.zeros_like(crowded), 2, 2).dispatch
    np.testing.assert_array_equal(jnp.sum(dispatch, axis=-1)[0], [[1, 1, 0, 0]] * 2 + [[0, 0, 0, 0]] * 2)


@pytest.mark.slow
def test_losses_are_their_formula(x64):
    logits, noise, key = draw((2, 8, 4), 3), draw((2, 8, 4), 4), jax.random.key(0)
    eps = np.asarray(jax.random.normal(key, logits.shape, jnp.float64))
    gates, load = slow(logits, noise, 2, eps)
    cv = [np.var(v.sum((0, 1))) / np.mean(v.sum((0, 1))) ** 2 for v in (gates, load)]
    got = noisy_gate(jnp.asarray(logits), jnp.asarray(noise), 8, 2, key, (0.3, 0.2)).loss
    assert float(got) == pytest.approx(0.3 * cv[0] + 0.2 * cv[1], rel=1e-9)


@pytest.mark.slow
def test_weights_of_zero_spread_the_load_evenly():
    """W_g = W_noise = 0: noise alone chooses, and every expert gets its share within what chance allows."""
    zeros = jnp.zeros((4, 512, 8))
    gates = noisy_top_k(zeros, zeros, 2, jax.random.key(0)).gates
    counts = np.asarray(jnp.sum(gates > 0, axis=(0, 1)))
    expected = 4 * 512 * 2 / 8
    assert np.all(np.abs(counts - expected) < 5 * math.sqrt(expected))


@pytest.mark.slow
def test_hierarchical_gates_match_the_loop(x64):
    a, b = 3, 4
    primary = noisy_top_k(jnp.asarray(draw((1, 5, a), 0)), jnp.asarray(draw((1, 5, a), 1)), 2)
    secondary = noisy_top_k(jnp.asarray(draw((1, 5, a, b), 2)), jnp.asarray(draw((1, 5, a, b), 3)), 2)
    got = hierarchical(primary, secondary)
    gates, load = np.zeros((5, a * b)), np.zeros(a * b)
    for i in range(a):
        takes = [s for s in range(5) if primary.gates[0, s, i] > 0]
        for j in range(b):
            for s in range(5):
                gates[s, i * b + j] = primary.gates[0, s, i] * secondary.gates[0, s, i, j]
            inner = sum(float(secondary.load[0, s, i, j]) for s in takes)
            load[i * b + j] = float(jnp.sum(primary.load[..., i])) * inner / max(len(takes), 1)
    np.testing.assert_allclose(got.gates[0], gates, atol=1e-12)
    np.testing.assert_allclose(jnp.sum(got.load, axis=(0, 1)), load, atol=1e-12)
    np.testing.assert_allclose(jnp.sum(got.gates, axis=-1), 1, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "even"), [((0.0, 0.0), False), ((0.1, 0.1), True)])
def test_losses_keep_the_load_even(weights, even):
    """500 steps of a toy mixture: without losses some experts take nearly all, with both the load stays even."""
    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.random.normal(keys[0], (1, 256, 8)) + 1.0
    wanted = jnp.tanh(x @ jax.random.normal(keys[1], (8, 8)))
    params = {
        "gate": jnp.zeros((8, 8)),
        "noise": jnp.zeros((8, 8)),
        "experts": jax.random.normal(keys[2], (8, 8, 8)) / 8,
    }

    def loss(p, rng):
        decided = noisy_top_k(x @ p["gate"], x @ p["noise"], 2, rng)
        made = jnp.einsum("gse,gsm,emh->gsh", decided.gates, x, p["experts"])
        balance = [squared_variation(jnp.sum(v, axis=(0, 1))) for v in (decided.gates, decided.load)]
        return jnp.mean((made - wanted) ** 2) + weights[0] * balance[0] + weights[1] * balance[1]

    def step(p, rng):
        grads = jax.grad(loss)(p, rng)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), ()

    params, _ = jax.jit(lambda p: jax.lax.scan(step, p, jax.random.split(keys[3], 500)))(params)
    decided: NoisyTopK = noisy_top_k(x @ params["gate"], x @ params["noise"], 2, jax.random.key(9))
    load = np.asarray(jnp.sum(decided.gates > 0, axis=(0, 1)))
    ratio = load.max() / load.mean()
    assert (ratio <= 1.3) if even else (ratio > 3), ratio
