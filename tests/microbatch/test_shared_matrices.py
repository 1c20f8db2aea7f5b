"""Loops under ``vmap`` that carry matrices of no example and vectors of each, as a Kalman filter: in microbatches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER


def positive(matrix):
    return matrix @ matrix.T + jnp.eye(3)


def root(matrix):
    return jnp.linalg.cholesky(positive(matrix))


def tridiagonal(matrix, vector):
    below, above = jnp.array([0.0, 0.1, 0.2]), jnp.array([0.1, 0.2, 0.0])
    return jax.lax.linalg.tridiagonal_solve(below, 2 + matrix[0] ** 2, above, vector[:, None])[:, 0]


#: (matrix of no example, vector of an example) -> vector
VECTORS: dict[str, Callable] = {
    "product": lambda P, m: P @ m,
    "solve": lambda P, m: jnp.linalg.solve(positive(P), m),
    "cho_solve": lambda P, m: sl.cho_solve((root(P), True), m),
    "lower": lambda P, m: sl.solve_triangular(root(P), m, lower=True),
    "upper": lambda P, m: sl.solve_triangular(root(P).T, m),
    "transposed": lambda P, m: sl.solve_triangular(root(P), m, lower=True, trans=1),
    "right": lambda P, m: jax.lax.linalg.triangular_solve(root(P), m[None], left_side=False, lower=True)[0],
    "tridiagonal": tridiagonal,
    "values": lambda P, m: jnp.linalg.eigh(positive(P))[0] * m,
    "branches": lambda P, m: jax.lax.cond(P.sum() > 0, lambda m: P @ m, lambda m: m * 2, m),
    "loop": lambda P, m: jax.lax.scan(lambda c, row: (c + row @ m, c), 0.0, P)[1],
}
#: (matrix, number of the iteration) -> matrix
MATRICES: dict[str, Callable] = {
    "kept": lambda P, i: P,
    "tanh": lambda P, i: jnp.tanh(P @ P.T),
    "riccati": lambda P, i: P - 0.1 * P @ jnp.linalg.inv(positive(P)) @ P,
    "counted": lambda P, i: P * 0.9 + i * 0.01,
}


def drawn(seed: int):
    """A train step whose loops carry matrices of no example, drawn by seed."""
    rng = np.random.default_rng(seed)
    names = [str(n) for n in rng.choice(sorted(VECTORS), rng.integers(1, 3))]
    matrix, kind = MATRICES[str(rng.choice(sorted(MATRICES)))], str(rng.choice(["scan", "fori", "reverse", "remat"]))

    def one(p, ys):
        def body(carry, y):
            m, P, i = carry
            for name in names:
                m = jnp.tanh(VECTORS[name](P, m) + y)
            return (m, matrix(P, i), i + 1), m * p["b"]

        initial = (p["b"], p["A"], 0.0)
        if kind == "fori":
            m, P, _ = jax.lax.fori_loop(0, 4, lambda t, c: body(c, ys[t])[0], initial)
            return (m**2).sum() + P.sum()
        repeated = jax.checkpoint(body) if kind == "remat" else body
        (_, P, _), out = jax.lax.scan(repeated, initial, ys, reverse=kind == "reverse")
        return (out**2).sum() + P.sum()

    def step(p, ys):
        loss, gradients = jax.value_and_grad(lambda p: jax.vmap(one, (None, 0))(p, ys).mean())(p)
        return jax.tree.map(lambda a, b: a - 0.01 * b, p, gradients), loss

    return step, {"A": 0.3 * rng.normal(size=(3, 3)), "b": rng.normal(size=3)}, rng.normal(size=(8, 4, 3))


def kalman(p, ys):
    """The log likelihood of observations, but for constants; covariances are of no example."""
    A, H = p["A"], p["H"]

    def body(carry, y):
        m, P = carry
        m, P = A @ m, A @ P @ A.T + 0.1 * jnp.eye(3)
        S = H @ P @ H.T + jnp.eye(2)
        K, e = P @ H.T @ jnp.linalg.inv(S), y - H @ m
        return (m + K @ e, P - K @ S @ K.T), e @ jnp.linalg.solve(S, e) + jnp.linalg.slogdet(S)[1]

    return jax.lax.scan(body, (jnp.zeros(3), jnp.eye(3)), ys)[1].sum()


def check(step, *arguments):
    four = autopar.parallelize(step, num_microbatches=4, num_stages=1, cluster=CLUSTER)
    wanted = jax.jit(step)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), four(*arguments), wanted)
    assert four.plan(*arguments).num_microbatches == 4


def test_a_kalman_filter(x64):
    rng = np.random.default_rng(0)

    def step(p, ys):
        loss, gradients = jax.value_and_grad(lambda p: jax.vmap(kalman, (None, 0))(p, ys).mean())(p)
        return jax.tree.map(lambda a, b: a - 0.01 * b, p, gradients), loss

    check(step, {"A": 0.9 * np.eye(3), "H": rng.normal(size=(2, 3))}, rng.normal(size=(8, 5, 2)))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(24))
def test_drawn_loops_with_matrices_of_no_example(x64, seed):
    check(*drawn(seed))
