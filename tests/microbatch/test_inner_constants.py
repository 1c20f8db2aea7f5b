"""Arrays that jitted helpers close over are constants of every program that is made of the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.padded import padded
from autopar.lower.rewrites import recomputed_step
from autopar.sharding.padding import candidates
from tests.end_to_end.clusters import MIDDLE
from tests.microbatch.running import assert_same_in_microbatches, step_of

WIDTH = 12
TABLE, WEIGHTS = np.linspace(0.5, 1.5, WIDTH), np.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
scaled = jax.jit(lambda v: v * TABLE)
mixed = jax.jit(lambda v: jnp.tanh(scaled(v) @ WEIGHTS))


@jax.custom_vjp
def ruled(v):
    return jnp.sin(scaled(v))


ruled.defvjp(lambda v: (ruled(v), v), lambda v, g: (scaled(jnp.cos(scaled(v)) * g),))

FORMS = {
    "helper of a helper": mixed,
    "scan": lambda v: lax.scan(lambda c, _: (mixed(c), None), v, None, length=3)[0],
    "cond": lambda v: jax.vmap(lambda r: lax.cond(jnp.sum(r) > 0, scaled, mixed, r))(v),
    "branch inside a loop": lambda v: lax.fori_loop(0, 3, lambda i, c: lax.cond(i > 1, scaled, mixed, c), v),
    "remat": jax.checkpoint(lambda v: scaled(mixed(v))),
    "custom derivative": ruled,
    "random key": jax.jit(lambda v: v * jax.random.uniform(jax.random.key(1), v.shape[1:])),
}


def loss_of(form):
    return lambda w, x: jnp.mean(form(jnp.tanh(x @ w)) ** 2)


def arguments():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((WIDTH, WIDTH))), jnp.asarray(rng.standard_normal((8, WIDTH)))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMS)
def test_in_microbatches_padded_and_recomputed(x64, name):
    def widened(traced):
        classes = candidates(traced.graph, 8, 9.0)
        return padded(traced, [d for c in classes for d in c.dims(traced.graph)])

    step = step_of(loss_of(FORMS[name]))
    args = arguments()
    assert_same_in_microbatches(step, args, (1, 2), rewrite=widened)
    assert_same_in_microbatches(step, args, (2,), rewrite=lambda traced: recomputed_step(traced, "full")[0])


def test_in_stages(x64):
    step = step_of(loss_of(FORMS["scan"]))
    args = arguments()
    options = {"cluster": MIDDLE, "num_stages": 2, "num_microbatches": 2}
    got, want = autopar.parallelize(step, **options)(*args), jax.jit(step)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12)


def test_a_loop_of_constants_recomputed(x64):
    """A loop over a table, that needs no example, runs again in the loop over microbatches."""

    def loss(w, x):
        total = lax.scan(lambda c, t: (jnp.sin(c + t), None), jnp.zeros(WIDTH), jnp.asarray(WEIGHTS))[0]
        return jnp.mean(jnp.tanh((x @ w) * total) ** 2)

    assert_same_in_microbatches(
        step_of(loss), arguments(), (2,), rewrite=lambda traced: recomputed_step(traced, "full")[0]
    )
