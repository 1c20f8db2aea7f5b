"""Masks of the forward pass as bits: the values of the plain step to the bit, and an eighth of the masks' bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Cluster, TraceError, parallelize
from autopar.transforms import packed_masks

LAYERS, WIDTH, BATCH = 4, 64, 512


def step(params, x, key):
    def loss(params):
        h = x
        for n, w in enumerate(params):
            h = jax.nn.relu(h @ w)
            keep = jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, h.shape)
            h = jnp.where(keep, h / 0.9, 0.0)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def arguments(rows=BATCH, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(k, (width, width)) / 8 for k in keys[1:]]
    return params, jax.random.normal(keys[0], (rows, width)), jax.random.key(7)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(("rows", "width"), [(BATCH, WIDTH), (BATCH, 60), (510, 60)])
def test_results_are_those_of_the_plain_step_to_the_bit(rows, width):
    args = arguments(rows, width)
    assert_equal(jax.jit(packed_masks(step))(*args), jax.jit(step)(*args))
    text = str(jax.make_jaxpr(packed_masks(step))(*args))
    assert ("shift_left" in text.split("transpose")[0]) == (rows % 8 == 0 or width % 8 == 0)


def test_each_mask_is_there_as_bits_once():
    jaxpr = jax.make_jaxpr(packed_masks(step))(*arguments()).jaxpr
    codes = [
        v.aval for e in jaxpr.eqns for v in e.outvars if v.aval.dtype == jnp.uint8 and e.primitive.name == "reduce_sum"
    ]
    assert [c.shape for c in codes] == [(BATCH, WIDTH // 8)] * 2 * LAYERS  # of ReLU and of dropout


@pytest.mark.slow
def test_compiled_memory_falls_by_the_masks():
    args = arguments(rows=4096)
    plain, packed = (
        jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes for f in (step, packed_masks(step))
    )
    masks = 2 * LAYERS * 4096 * WIDTH
    assert plain - packed >= 0.8 * masks * 7 / 8


@pytest.mark.slow
def test_plans_hold_less_and_run_the_same():
    args = arguments(rows=4096)
    options = {"num_stages": 1, "num_microbatches": 1, "remat": "none"}
    plain, packed = (
        parallelize(f, cluster=Cluster.load("dgx-a100"), mesh_shape=(8,), **options).plan(*args).stages[0].memory
        for f in (step, packed_masks(step))
    )
    assert packed.total < 0.8 * plain.total
    sharded = parallelize(packed_masks(step), mesh_shape=(8,), **options)(*arguments())
    wanted = jax.jit(step)(*arguments())
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(TraceError, match="differentiates nothing"):
        packed_masks(lambda x: jnp.where(x > 0, x, 0.0))(jnp.ones((64, 64)))
