"""Batches of factorizations on CPU devices: one matrix after another, so that no device waits for threads of others."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax import linalg

import autopar
from autopar.lower.localize.linalg import LOCALIZERS
from autopar.sharding.rules.linalg import RULES

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
    "products": lambda x: jax.lax.linalg.ormqr(jnp.tril(x) / 99, x[..., 0] / 99, x),
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


def test_every_primitive_of_a_batch_of_matrices_has_a_rule():
    """jax has no `cholesky_update` of a batch."""
    batched = {p.name for name, p in vars(linalg).items() if name.endswith("_p")} - {"cholesky_update"}
    assert len(batched) > 10
    assert batched <= set(RULES)


def test_factorizations_have_localizers():
    assert set(LOCALIZERS) >= {"cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"}


SOLVES = {
    "left": (1, lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)),
    "right": (0, lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=False, lower=True)),
    "tridiagonal": (1, lambda a, b: jax.lax.linalg.tridiagonal_solve(a[0].at[0].set(0), 4 + a[1] ** 2, a[2] * ENDS, b)),
}
ENDS = jnp.ones(24).at[-1].set(0)


@pytest.mark.parametrize("name", SOLVES)
def test_right_hand_sides_are_split(name):
    dim, solve = SOLVES[name]
    a = jnp.tril(jax.random.normal(jax.random.key(0), (24, 24))) / 8 + jnp.eye(24)
    b = jax.random.normal(jax.random.key(1), (24, 40_000) if dim else (40_000, 24))
    parallel = autopar.parallelize(solve, constraints={"b": (dim,)}, num_stages=1)
    np.testing.assert_allclose(parallel(a, b), solve(a, b), rtol=2e-3, atol=2e-3)
    compiled = parallel.compile(a, b)
    (operator,) = [o for o in compiled.plan.content.operators if "solve" in o.id]
    assert "x" in operator.operands[-1] and operator.results == (operator.operands[-1],)
