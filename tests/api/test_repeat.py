"""A call like the last one takes the short way, and any other does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER, Module, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same


def test_the_short_way_gives_the_same():
    f = autopar.parallelize(sgd, cluster=CLUSTER)
    assert f._plain.repeat((params(), batch()), {}) == (False, None)
    f(params(), batch())
    for seed in range(3):
        done, result = f._plain.repeat((params(seed), batch(seed=seed)), {})
        assert done
        assert_trees_same(result, sgd(params(seed), batch(seed=seed)))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((params(), batch(8)), {}),
        ((params(), batch(hidden=8)), {}),
        ((params(),), {"data": batch()}),
        ((params(), batch(), 0.5), {}),
        ((jax.tree.map(lambda x: x.astype(jnp.bfloat16), params()), batch()), {}),
        ((params(), {**batch(), "more": np.ones(3)}), {}),
    ],
    ids=["size", "hidden", "keyword", "more", "dtype", "structure"],
)
def test_another_call_goes_the_long_way(args, kwargs):
    f = autopar.parallelize(sgd, cluster=CLUSTER)
    f(params(), batch())
    assert not f._plain.repeat(args, kwargs)[0]


def test_static_leaves_are_compared():
    f = autopar.parallelize(lambda m, x: (m(x), m), cluster=CLUSTER)
    x = jnp.ones((8, 4))
    m = Module(jnp.ones((4, 8)), jnp.tanh, "layer", 2.0)
    f(m, x)
    done, (y, same) = f._plain.repeat((m, x), {})
    assert done and same.activation is jnp.tanh and same.scale == 2.0
    assert_trees_same(y, m(x))
    other = Module(jnp.ones((4, 8)), jnp.sin, "layer", 2.0)
    assert not f._plain.repeat((other, x), {})[0]
    assert_trees_same(f(other, x)[0], other(x))


def test_static_arguments_take_the_long_way():
    f = autopar.parallelize(lambda x, n: x * n, cluster=CLUSTER, static_argnums=1)
    for n in (2, 3, 2):
        assert f(jnp.ones(8), n)[0] == n
        assert not f._plain.repeat((jnp.ones(8), n), {})[0]
