"""Linear algebra of a matrix of each example, under ``vmap`` and by leading dims: in microbatches, split, in stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
import numpy as np
import pytest
from jax.lax import linalg

import autopar
from autopar.search import Manual
from tests.api.steps import CLUSTER

SIDE = 4


def column(solve: Callable) -> Callable:
    """A solve of columns as one of vectors."""
    return lambda M, v: solve(M, v[..., None])[..., 0]


def tridiagonal(M, v):
    below, above = M[..., 0, :].at[..., 0].set(0), M[..., 2, :].at[..., -1].set(0)
    return linalg.tridiagonal_solve(below, 9 + M[..., 1, :] ** 2, above, v[..., None])


#: (positive matrices, vectors) -> floats; both may have dims in front.
FUNCTIONS: dict[str, Callable] = {
    "solve": column(jnp.linalg.solve),
    "inverse": lambda M, v: jnp.linalg.inv(M),
    "determinant": lambda M, v: jnp.linalg.det(M),
    "logarithm": lambda M, v: jnp.linalg.slogdet(M)[1],
    "cholesky": lambda M, v: jnp.linalg.cholesky(M),
    "cho_solve": column(lambda M, b: sl.cho_solve(sl.cho_factor(M), b)),
    "lu_solve": column(lambda M, b: sl.lu_solve(sl.lu_factor(M), b)),
    "factors": lambda M, v: linalg.lu(M)[0],
    "eigenvalues": lambda M, v: jnp.linalg.eigvalsh(M),
    "eigenvectors": lambda M, v: jnp.abs(jnp.linalg.eigh(M)[1]),
    "singular": lambda M, v: jnp.linalg.svd(M + v[..., None], compute_uv=False),
    "orthogonal": lambda M, v: jnp.linalg.qr(M + v[..., None])[0],
    "pivoted": lambda M, v: jnp.abs(linalg.qr(M + v[..., None], pivoting=True)[1]),
    "inverted": lambda M, v: jnp.linalg.pinv(M),
    "exponential": lambda M, v: sl.expm(M / 9),
    "lower": column(lambda M, b: sl.solve_triangular(M, b, lower=True)),
    "transposed": column(lambda M, b: sl.solve_triangular(M, b, trans=1)),
    "right": lambda M, v: linalg.triangular_solve(M, v[..., None, :], lower=True),
    "tridiagonal": tridiagonal,
    "reflectors": lambda M, v: linalg.householder_product(jnp.tril(M) / 9, v / 9),
    "reflected": lambda M, v: linalg.ormqr(jnp.tril(M) / 9, v / 9, M[..., :, :2]),
    "reflected from the right": lambda M, v: linalg.ormqr(jnp.tril(M) / 9, v / 9, M[..., :2, :], left=False),
    "hessenberg": lambda M, v: jnp.abs(linalg.hessenberg(M + v[..., None])[0]),
    "schur": lambda M, v: jnp.abs(linalg.schur(M)[0]),
    "general": lambda M, v: jnp.abs(jnp.linalg.eigvals(M)).sum(-1),
    "symmetric": lambda M, v: linalg.tridiagonal(M)[1],
}
WAYS = {
    "microbatches": {"num_microbatches": 4, "num_stages": 1},
    "split": {"search": Manual(dp=8)},
    "stages": {"num_microbatches": 2, "num_stages": 2},
}


def drawn(seed: int) -> tuple[Callable, Callable]:
    """A step through functions of `FUNCTIONS`, drawn by seed: one alone, or two, mapped or not, in a loop or not.

    With it one that does not train.
    """
    rng = np.random.default_rng(seed)
    names = [sorted(FUNCTIONS)[seed % len(FUNCTIONS)], *map(str, rng.choice(sorted(FUNCTIONS), rng.integers(0, 2)))]
    mapped, looped = rng.integers(2, size=2)

    def one(M, v):
        for name in names:
            y = jnp.sin(FUNCTIONS[name](M, v))
            v = v + jnp.sum(y, tuple(range(v.ndim - 1, y.ndim)))[..., None] / 9
        return v

    def run(M, v):
        return jax.lax.scan(lambda c, _: (one(M, c), None), v, None, length=2)[0] if looped else one(M, v)

    def loss(p, x):
        M = x @ x.mT / 2 + p["A"] @ p["A"].T + 3 * jnp.eye(SIDE) + jnp.diag(2.0 * jnp.arange(SIDE))
        v = jnp.sin(x[:, 0]) * p["b"]
        return (jax.vmap(run) if mapped else run)(M, v).sum(-1).mean()

    def step(p, x):
        value, gradients = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, b: a - 0.01 * b, p, gradients), value

    return step, lambda p, x: (jax.tree.map(lambda a: 0.9 * a, p), loss(p, x))


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2 * len(FUNCTIONS)))
def test_drawn_steps(x64, seed, way):
    rng = np.random.default_rng(seed)
    arguments = {"A": rng.normal(size=(SIDE, SIDE)) / 3, "b": rng.normal(size=SIDE)}, rng.normal(size=(8, SIDE, SIDE))
    step, untrained = drawn(seed)
    try:
        jax.eval_shape(step, *arguments)
    except (NotImplementedError, TypeError, ValueError):  # jax has no derivative of it, or that has a fault
        step = untrained
        if way == "stages":
            pytest.skip("nothing to train")
    parallel = autopar.parallelize(step, cluster=CLUSTER, **WAYS[way])
    wanted = jax.jit(step)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), parallel(*arguments), wanted)
    if "num_microbatches" in WAYS[way]:
        assert parallel.plan(*arguments).num_microbatches == WAYS[way]["num_microbatches"]
