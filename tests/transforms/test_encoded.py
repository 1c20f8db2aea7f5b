"""Gist's exact codes: the values of the plain step to the bit, less memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import Cluster, parallelize
from autopar.transforms import encoded
from tests.transforms.vgg import build


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def pooled(window, stride, padding):
    def step(x, w):
        def loss(w):
            y = lax.reduce_window(jnp.maximum(x * w, 0.0), -jnp.inf, lax.max, (1, *window, 1), (1, *stride, 1), padding)
            return jnp.sum(jnp.sin(y))

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    return step


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME"), ((3, 3), (2, 2), "VALID"), ((2, 3), (1, 2), "SAME")],
)
def test_gradients_of_maxima_are_those_of_the_plain_step_to_the_bit(window, stride, padding):
    x = jnp.round(4 * jax.random.normal(jax.random.key(0), (4, 13, 14, 8)))  # with equal elements in windows
    w = jax.random.normal(jax.random.key(1), (13, 14, 8)) ** 2
    step = pooled(window, stride, padding)
    assert_equal(jax.jit(encoded(step))(x, w), jax.jit(step)(x, w))
    text = str(jax.make_jaxpr(encoded(step))(x, w))
    assert "select_and_scatter_add" in str(jax.make_jaxpr(step)(x, w)) and "select_and_scatter_add" not in text


def test_a_network_with_exact_codes_is_the_same_to_the_bit():
    step, args = build(channels=(8, 16), size=16, batch=4)
    assert_equal(jax.jit(encoded(step))(*args), jax.jit(step)(*args))


def test_plans_hold_less_and_run_the_same():
    step, args = build(channels=(8, 16), size=16, batch=16)
    options = {"num_stages": 1, "num_microbatches": 1, "remat": "none", "mesh_shape": (8,)}
    plain, less = (
        parallelize(f, cluster=Cluster.load("dgx-a100"), **options).plan(*args).stages[0].memory
        for f in (step, encoded(step))
    )
    assert less.total < plain.total
    found, wanted = parallelize(encoded(step), **options)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_memory_of_vgg16_falls_as_gist_says():
    """VGG16 on images of 224 x 224, 64 at a time: feature maps are most of what the plain step holds."""
    step, args = build(abstract=True)
    plain, exact = (
        jax.jit(f, donate_argnums=0).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (step, encoded(step))
    )
    assert plain / exact >= 3  # 12.7 GB to 3.5 GB; the paper has 1.8 for all of it
