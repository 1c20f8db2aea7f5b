"""Loops of no trips, arrays without elements, gradients without data, barriers around numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.microbatch import microbatched
from autopar.lower.rewrites import recomputed_step
from tests.microbatch.running import numbers, run, step_of, traced

SIZE = 8


def layer(c, w):
    return jnp.tanh(c @ w)


FORMS = {
    "no layers": lambda w, x: lax.scan(lambda c, k: (layer(c, k), c.sum()), x, jnp.zeros((0, SIZE, SIZE)))[0] @ w,
    "no trips": lambda w, x: lax.scan(lambda c, _: (layer(c, w), None), x, None, length=0)[0] @ w,
    "fori": lambda w, x: lax.fori_loop(0, 0, lambda i, c: layer(c, w), x) @ w,
    "map": lambda w, x: (x @ w) + lax.map(lambda r: r @ w, x[:0]).sum(),
    "in a loop": lambda w, x: lax.scan(
        lambda c, _: (lax.scan(lambda d, _: (layer(d, w), None), c, None, length=0)[0] @ w, None), x, None, length=2
    )[0],
    "remat": lambda w, x: lax.scan(jax.checkpoint(lambda c, _: (layer(c, w), None)), x, None, length=0)[0] @ w,
    "barrier of a number": lambda w, x: jnp.multiply(*lax.optimization_barrier((layer(x, w), 2.0))),
    "no rows": lambda w, x: (x @ w) + (x[:0] @ w).sum() + jnp.concatenate([w[:0], w]).sum(),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients(x64, name):
    rng = np.random.default_rng(0)
    args = jnp.asarray(rng.standard_normal((SIZE, SIZE))), jnp.asarray(rng.standard_normal((SIZE, SIZE)))
    step = step_of(lambda w, x: jnp.mean(FORMS[name](w, x) ** 2))
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    found, leaves = traced(step, args)
    for program in (found, microbatched(recomputed_step(found, "full")[0], 2)):
        for got, want in zip(map(numbers, run(program, leaves)), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_step_of_loops_of_no_trips_is_planned_and_runs(x64):
    rng = np.random.default_rng(0)
    args = jnp.asarray(rng.standard_normal((SIZE, SIZE))), jnp.asarray(rng.standard_normal((SIZE, SIZE)))
    step = step_of(lambda w, x: sum(jnp.mean(FORMS[n](w, x) ** 2) for n in ("no layers", "fori", "map", "in a loop")))
    got, want = autopar.parallelize(step, num_microbatches=2)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10)


def test_empty_stacks_have_their_types(x64):
    def step(x, key):
        return lax.scan(lambda c, _: (c, (c, c > 0, jax.random.key(1))), x, None, length=0)[1], key

    x, key = jnp.ones((SIZE, 2)), jax.random.key(0)
    got, want = autopar.parallelize(step)(x, key), jax.jit(step)(x, key)
    types = [[(a.shape, a.dtype, getattr(a, "weak_type", None)) for a in jax.tree.leaves(tree)] for tree in (got, want)]
    assert types[0] == types[1]


def test_gradients_of_integers_have_no_data():
    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"])[:, p["i"]] ** 2), allow_int=True)(p)
        _, moved = jax.jvp(lambda i: i * 2, (p["i"],), (grads["i"],))
        return loss, grads, moved

    params, x = {"w": jnp.ones((SIZE, SIZE)), "i": jnp.array([1, 2])}, jnp.ones((SIZE, SIZE))
    loss, grads, moved = autopar.parallelize(step, num_microbatches=2)(params, x)
    wanted = jax.jit(step)(params, x)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], wanted[1]["w"], rtol=1e-6)
    assert grads["i"].dtype == moved.dtype == jax.dtypes.float0 and grads["i"].shape == moved.shape == (2,)
