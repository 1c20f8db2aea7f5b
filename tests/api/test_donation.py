"""Donated buffers are given up, and nothing crashes where one is used again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.search import Manual
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)


def deleted(tree):
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "p"}, {"donate_argnums": (-3,)}])
@pytest.mark.parametrize("by_name", [False, True])
def test_donated_state_is_deleted(options, by_name):
    f = parallelize(sgd, **options)
    p, want = params(), params()
    for _ in range(3):
        old = p
        p, loss = f(p=p, data=batch()) if by_name else f(p, batch())
        want, expected = sgd(want, batch())
        assert all(deleted(old)) and not any(deleted(p))
        assert_trees_same((p, loss), (want, expected))


@pytest.mark.parametrize("warm", [False, True])
def test_a_donated_array_used_again_is_an_error(warm):
    f = parallelize(sgd, donate_argnums=0)
    p = params()
    if warm:
        p, _ = f(p, batch())
        p, _ = f(p, batch())
    f(p, batch())
    for _ in range(2):
        with pytest.raises(autopar.AutoparError, match=r"p\['b'\] was donated"):
            f(p, batch())


def test_a_deleted_array_without_donation_is_an_error():
    f, p = parallelize(sgd), params()
    f(p, batch())
    p["w"].delete()
    with pytest.raises(autopar.AutoparError, match="w"):
        f(p, batch())


def test_a_donated_batch_of_numpy_keeps_the_callers_array():
    f = parallelize(lambda p, x: (p + x.sum(0), x * 2), donate_argnums=(0, 1))
    x = np.ones((8, 8), np.float32)
    for _ in range(2):
        _, doubled = f(jnp.zeros(8), x)
        assert (np.asarray(doubled) == 2).all() and (x == 1).all()


def test_a_donated_batch_of_jax():
    f = parallelize(sgd, donate_argnames=("data",))
    data = jax.tree.map(jnp.asarray, batch())
    with pytest.warns(UserWarning, match=r"donated buffers were not usable: data"):
        f(params(), data)
    assert all(deleted(data))


def test_one_array_at_two_places_of_a_state_that_is_moved():
    """Both are copied to all devices: where the array lies already the two must not share its buffer."""

    def step(state, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        m, v = 0.9 * state["m"] + grads, 0.99 * state["v"] + grads**2
        return {"w": state["w"] - 0.1 * m / (jnp.sqrt(v) + 1e-3), "m": m, "v": v}

    def state(zeros):
        return {"w": jnp.ones((64, 64)), "m": zeros, "v": zeros}

    f, x = parallelize(step, donate_argnums=0, search=Manual(dp=8)), jnp.ones((16, 64))
    for _ in range(2):
        assert_trees_same(f(state(jnp.zeros((64, 64))), x), jax.jit(step)(state(jnp.zeros((64, 64))), x))


def test_one_array_donated_twice():
    f = parallelize(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))
    x = jnp.ones((8, 8))
    for _ in range(3):
        a, b = f(x, x)
        assert x.is_deleted() and (a == 2).all() and (b == 3).all()
        x = jnp.ones((8, 8))
    x = f(x, x)[0]
    a, b = f(x, x)
    assert (a == 3).all() and (b == 4).all()


def test_one_array_donated_and_kept():
    f = parallelize(lambda a, b: (a + 1, b * 2), donate_argnums=0)
    x, _ = f(jnp.ones((8, 8)), jnp.ones((8, 8)))
    a, b = f(x, x)
    assert (a == 3).all() and (b == 4).all()


def test_a_donated_array_passed_through():
    f = parallelize(lambda s, x: (s, x.sum()), donate_argnums=0)
    s = jnp.arange(8.0)
    for _ in range(3):
        s, _ = f(s, jnp.ones(8))
    assert_trees_same(s, jnp.arange(8.0))


def test_memory_of_donated_state_is_reused():
    def aliased(**options):
        f = parallelize(lambda s, x: (s + x.sum(), x.mean()), **options)
        return f.compile(jnp.ones((64, 64)), jnp.ones((8, 8))).memory_analysis().alias_size_in_bytes

    assert aliased() == 0
    assert aliased(donate_argnums=0) > 0
