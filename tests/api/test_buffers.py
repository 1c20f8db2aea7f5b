"""numpy arrays that their owner fills again: those that a function closes over, those that a call was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from tests.api.steps import CLUSTER

WAYS = {
    "whole": {"mesh_shape": (8,), "constraints": {"**": ()}},
    "free": {},
    "split": {"constraints": {"x": (0,)}},
    "microbatches": {"num_microbatches": 2, "batch_argnums": 1},
    "stages": {"num_microbatches": 2, "num_stages": 2, "batch_argnums": 1},
}


def aligned(shape, value):
    """An array at an address that jax takes without a copy where it may."""
    count = int(np.prod(shape))
    raw = np.zeros(4 * count + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][: 4 * count].view(np.float32).reshape(shape)
    array[:] = value
    return array


def step_with(table):
    def step(w, x):
        def loss(w):
            def layer(c, w):
                return jnp.tanh(c @ w) * table[2] + jax.jit(lambda v: v + table[1])(c), None

            return jnp.mean(lax.scan(layer, x + table[0], w)[0] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    return step


@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_is_closed_over_is_as_it_was_when_the_function_was_traced(way):
    table, w, x = aligned((4, 64), 0.5), aligned((4, 64, 64), 0.1), aligned((16, 64), 0.25)
    want = np.asarray(jax.jit(step_with(table.copy()))(w, x))
    step = autopar.parallelize(step_with(table), cluster=CLUSTER, **WAYS[way])
    step.plan(w, x)
    table[:] = 7
    for _ in range(2):
        np.testing.assert_allclose(step(w, x), want, rtol=2e-5, atol=1e-6)
        table[:] += 1


CLOSED_OVER = {
    "at once": lambda c: lambda x: x + c,
    "in a jitted helper": lambda c: lambda x: jax.jit(lambda v: v + c)(x),
    "in a loop": lambda c: lambda x: lax.scan(lambda a, _: (a + c, None), x, None, length=2)[0],
    "in a branch": lambda c: lambda x: lax.cond(x[0] > 0, lambda x: x + c, lambda x: x, x),
    "in a gradient": lambda c: jax.grad(lambda x: (jnp.sin(x) * c).sum()),
    "in a derivative of its own": lambda c: jax.grad(lambda x: jax.nn.relu(x * c).sum()),
}


@pytest.mark.parametrize("where", CLOSED_OVER)
@pytest.mark.parametrize("first", ["plan", "__call__"])
def test_an_array_that_is_closed_over_is_copied_once(where, first):
    table, x = aligned((64,), 1), np.ones(64, np.float32)
    want = np.asarray(jax.jit(CLOSED_OVER[where](table.copy()))(x))
    step = autopar.parallelize(CLOSED_OVER[where](table), cluster=CLUSTER)
    getattr(step, first)(x)
    table[:] = 7
    np.testing.assert_array_equal(step(x), want)


def test_a_jax_array_that_is_closed_over_may_be_given_up_by_another_call():
    table = jnp.full(64, 3.0)
    step = autopar.parallelize(lambda x: x * table, cluster=CLUSTER)
    assert step(jnp.ones(64)).sum() == 192
    jax.block_until_ready(jax.jit(lambda t: t + 1, donate_argnums=0)(table))
    assert step(jnp.ones(64)).sum() == 192


@pytest.mark.parametrize("way", WAYS)
def test_arguments_may_be_filled_again_as_soon_as_a_call_has_returned(way):
    def step(w, x):
        def loss(w):
            return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0] ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, x, value

    decorated = autopar.parallelize(step, cluster=CLUSTER, **WAYS[way])
    w, x = aligned((4, 64, 64), 0.1), aligned((512, 64), 0.5)
    want = jax.tree.map(np.array, jax.jit(step)(w.copy(), x.copy()))
    for _ in range(3):
        w[:], x[:] = 0.1, 0.5
        got = decorated(w, x)
        w[:], x[:] = 7, 7
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("constraint", [(), (0,)])
def test_what_shard_placed_is_not_the_callers_buffer(constraint):
    step = autopar.parallelize(lambda w, x: (x @ w).sum(), cluster=CLUSTER, constraints={"w": constraint})
    w = aligned((64, 64), 1)
    placed, _ = step.shard(w, np.ones((8, 64), np.float32))
    w[:] = 7
    assert np.unique(placed).tolist() == [1]
