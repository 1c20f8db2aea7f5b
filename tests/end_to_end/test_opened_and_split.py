"""Operators that hold a program are opened, and those that jax writes for stacks, tiles and named axes are split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.scipy.sparse.linalg import cg

import autopar
from autopar.ir import Layout
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import assert_same

CLUSTER = toy(bandwidth=1e12, flops=1e7)
MESHES = [(8,), (2, 4)]
X = np.sin(np.arange(128, dtype=np.float32)).reshape(16, 8)
W = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)


def split_operators(plan, primitive):
    """Whether each operator of a primitive has a result that is not whole."""
    return [
        any(not Layout.parse(text).is_replicated for text in r.results)
        for r in plan.content.operators
        if r.id.rsplit("/", 1)[-1].rsplit(".", 1)[0] == primitive
    ]


def stacked(x, w):
    first, second = jnp.unstack((x @ w).reshape(16, 2, 4), axis=1)
    return jnp.stack([jnp.sin(first), second * first], axis=1)


def tiled(x, w):
    return jnp.tile(x @ w, (2, 1)), jnp.tile(x, (1, 2)) @ jnp.concatenate([w, w])


def reduced(x, w):
    def row(r):
        y = r @ w
        return lax.psum(y, "rows"), lax.pmax(jnp.sin(y), "rows"), lax.pmin(y, "rows") * r[0]

    return jax.vmap(row, axis_name="rows")(x)


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize(
    ("fn", "primitives"),
    [(stacked, ("stack", "unstack")), (tiled, ("tile",)), (reduced, ("psum", "pmax", "pmin"))],
)
def test_is_split(fn, primitives, mesh_shape):
    parallel = assert_same(fn, (X, W), cluster=CLUSTER, mesh_shape=mesh_shape)
    plan = parallel.plan(X, W)
    assert not plan.content.notes
    for primitive in primitives:
        found = split_operators(plan, primitive)
        assert found, f"this jax writes no {primitive}"
        assert all(found), primitive


def solved(w, x, y):
    def loss(w):
        matrix = x.T @ x / 16 + jnp.diag(jnp.exp(w))
        return jnp.square(cg(lambda v: matrix @ v, x.T @ y, tol=1e-6)[0]).sum()

    return jax.value_and_grad(loss)(w)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_custom_linear_solve_is_opened(mesh_shape):
    args = np.zeros(8, np.float32), X, X[:, 0]
    parallel = assert_same(solved, args, cluster=CLUSTER, mesh_shape=mesh_shape)
    ids = [r.id for r in parallel.plan(*args).content.operators]
    assert any("while" in id for id in ids)
    assert not any("custom_linear_solve" in id for id in ids)


def doubling(name):
    """A primitive of another package, whose implementation is a function of jax."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *, offset: jnp.sin(x) * 2 + offset)
    primitive.def_abstract_eval(lambda x, *, offset: x)
    mlir.register_lowering(primitive, mlir.lower_fun(primitive.impl, multiple_results=False))
    return primitive


@pytest.mark.parametrize(("name", "opened"), [("maybe_set", True), ("another_package_has_this", False)])
def test_known_primitives_of_others_are_opened(name, opened):
    primitive = doubling(name)

    def step(x, w):
        return primitive.bind(x @ w, offset=3.0)

    parallel = autopar.parallelize(step, cluster=CLUSTER, mesh_shape=(8,))
    np.testing.assert_allclose(parallel(X, W), jax.jit(step)(X, W), rtol=1e-5)
    plan = parallel.plan(X, W)
    assert bool(plan.content.notes) is not opened
    assert split_operators(plan, name) == ([] if opened else [False])
