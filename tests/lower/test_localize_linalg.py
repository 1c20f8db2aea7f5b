"""Batches of factorizations on CPU devices: one matrix after another, so that no device waits for threads of others."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.lower.localize.linalg import LOCALIZERS

KERNEL = re.compile(r'= \(?[a-z0-9]+\[([0-9,]*)\][^=]*custom_call_target="lapack_[a-z_]+"')


def eigh(x):
    values, vectors = jnp.linalg.eigh(x @ x.mT)
    return values, jnp.abs(vectors)


def solve(x):
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(x @ x.mT + 8 * jnp.eye(24)), x)


def tridiagonal(x):
    lower, diagonal, upper = x[..., 0].at[..., 0].set(0), 4 + x[..., 1] ** 2, x[..., 2].at[..., -1].set(0)
    return jax.lax.linalg.tridiagonal_solve(lower, diagonal, upper, x)


STEPS = {
    "eigh": eigh,
    "qr": lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "lu": lambda x: jax.lax.linalg.lu(x)[0],
    "solve": solve,
    "tridiagonal": tridiagonal,
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("batch", [(32,), (16, 2)], ids=str)
def test_no_kernel_is_given_a_batch(name, batch):
    step, x = STEPS[name], jax.random.normal(jax.random.key(0), (*batch, 24, 24))
    parallel = autopar.parallelize(step, constraints={"x": (0,)}, num_stages=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), jax.jit(step)(x), parallel(x))
    compiled = parallel.compile(x)
    assert "x" in str(compiled.plan.content.inputs[0].layout), "the batch is split"
    kernels = KERNEL.findall(compiled.as_text())
    assert kernels
    for shape in kernels:
        assert np.prod([int(n) for n in shape.split(",")[:-2]], initial=1) == 1


def test_factorizations_have_localizers():
    assert set(LOCALIZERS) >= {"cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"}
