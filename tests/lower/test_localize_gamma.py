"""Gamma numbers are those of one device, whichever dims of their parameters are split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.end_to_end.clusters import FAST


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_gamma_and_beta_of_one_key(mesh_shape):
    def draw(key, scale):
        alpha = 1.0 + jnp.square(scale)
        keys = jax.random.split(key, scale.shape[0])
        return (
            scale * jax.random.gamma(key, alpha),
            scale * jax.random.beta(key, alpha, 2.0),
            scale * jax.vmap(jax.random.gamma)(keys, alpha),
        )

    args = jax.random.key(0), jnp.linspace(0.0, 1.0, 32).reshape(8, 4)
    got = autopar.parallelize(draw, cluster=FAST, mesh_shape=mesh_shape)(*args)
    for g, w in zip(got, jax.jit(draw)(*args), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5)
