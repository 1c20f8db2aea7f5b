"""Branches that keep different things for the backward pass in one buffer run in microbatches, at any depth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.branches import with_own_buffers
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same
from tests.microbatch.running import assert_same_in_microbatches, step_of

W = np.random.default_rng(0).standard_normal((6, 6), np.float32)
X = np.random.default_rng(1).standard_normal((16, 6), np.float32)


def saves_a_parameter(p, x):
    h = lax.cond(p["a"][0, 0] > 0, lambda h: jnp.tanh(h @ p["a"]), lambda h: jnp.sin(jnp.cos(h) @ p["b"]) @ p["a"], x)
    return jnp.mean(h**2)


def saves_what_it_makes_of_one(p, x):
    doubled = p["b"].sum()
    h = lax.switch(
        jnp.int32(p["a"][0, 0] > 0),
        [lambda h: jnp.sin(h @ jnp.tanh(p["a"] * doubled)), lambda h: jnp.exp(jnp.sin(h)) @ p["b"]],
        x,
    )
    return jnp.mean((h @ p["a"]) ** 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", [saves_a_parameter, saves_what_it_makes_of_one], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sign", [1, -1])
def test_branches_of_a_batch_with_the_size_of_a_parameter(loss, sign):
    p, x = {"a": sign * np.abs(W), "b": W.T.copy()}, X[:6]
    step = step_of(loss)
    for count in (2, 3):
        got = autopar.parallelize(step, cluster=CLUSTER, num_microbatches=count, num_stages=1)(p, x)
        assert_trees_same(got, step(p, x))


def layers_of_branches(p, x):
    """Each layer takes its own weights from a stack, and the branch by one of them."""

    def body(h, w):
        a, b = w
        return lax.cond(a[0, 0] > 0, lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a, h), None

    return jnp.mean(lax.scan(body, x, (p["a"], p["b"]))[0] ** 2)


def branches_in_a_loop(p, x):
    """Every iteration has the same weights."""
    a, b = p["a"][0], p["b"][1]

    def body(h, _):
        return lax.cond(a[0, 0] > 0, lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a, h), None

    return jnp.mean(lax.scan(body, x, None, length=3)[0] ** 2)


def branches_in_nested_loops(p, x):
    def outer(h, w):
        a, b = w

        def inner(h, v):
            own = jnp.tanh(a * v)
            return lax.switch(
                jnp.int32(v > 0) + jnp.int32(a[0, 0] > 0),
                [lambda h: jnp.sin(h @ own), lambda h: jnp.sin(jnp.cos(h) @ b) @ a, lambda h: jnp.exp(-(h**2)) @ own],
                h,
            ), None

        return lax.scan(inner, h, p["v"])[0], None

    return jnp.mean(lax.scan(outer, x, (p["a"], p["b"]))[0] ** 2)


def recomputed_branches_in_a_loop(p, x):
    @jax.checkpoint
    def body(h, w):
        a, b = w
        return lax.cond(a[0, 0] > 0, lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a, h), None

    return jnp.mean(lax.scan(body, x, (p["a"], p["b"]), reverse=True)[0] ** 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "loss",
    [layers_of_branches, branches_in_a_loop, branches_in_nested_loops, recomputed_branches_in_a_loop],
    ids=lambda f: f.__name__,
)
def test_branches_inside_loops_of_a_batch_with_the_size_of_a_parameter(loss):
    signs = np.asarray([1, -1, 1], np.float32)[:, None, None]  # the layers take different branches
    p = {
        "a": signs * np.abs(np.random.default_rng(3).standard_normal((3, 6, 6), np.float32)),
        "b": np.random.default_rng(4).standard_normal((3, 6, 6), np.float32),
        "v": np.asarray([0.5, -0.25], np.float32),
    }
    step = step_of(loss)
    for count in (2, 3):
        got = autopar.parallelize(step, cluster=CLUSTER, num_microbatches=count, num_stages=1)(p, X[:6])
        assert_trees_same(got, step(p, X[:6]), rtol=1e-4)


# -- branches inside branches -------------------------------------------------------------------------


def branch_in_branch(h, a, b):
    def positive(h):
        return lax.cond(b[0, 0] > 0, lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a, h)

    return lax.cond(a[0, 0] > 0, positive, lambda h: jnp.exp(-((h @ b) ** 2)) @ a, h)


def twice_nested(p, x):
    return jnp.mean(branch_in_branch(x, p["a"][0], p["b"][0]) ** 2)


def thrice_nested(p, x):
    a, b = p["a"][2], p["b"][1]

    def deeper(h):
        h = lax.cond(a[1, 1] > 0, lambda h: branch_in_branch(h, a, b), lambda h: jnp.sin(h @ b) @ a, h)
        return jnp.tanh(h @ a)

    return jnp.mean(lax.cond(b[1, 2] > 0, deeper, lambda h: jnp.tanh(h @ b), x) ** 2)


def switch_in_switch(p, x):
    a, b = p["a"][0], p["b"][1]
    inner = [lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a]
    outer = [
        lambda h: jnp.sin(h @ jnp.tanh(a)),
        lambda h: lax.switch(jnp.int32(b[1, 0] > 0), inner, h),
        lambda h: jnp.exp(-(h**2)) @ a,
    ]
    return jnp.mean(lax.switch(jnp.int32(a[0, 0] > 0) + jnp.int32(b[0, 0] > 0), outer, x) ** 2)


def nested_in_layers(p, x):
    return jnp.mean(lax.scan(lambda h, w: (branch_in_branch(h, *w), None), x, (p["a"], p["b"]))[0] ** 2)


def nested_in_layers_recomputed(p, x):
    layer = jax.checkpoint(lambda h, w: (branch_in_branch(h, *w), None))
    return jnp.mean(lax.scan(layer, x, (p["a"], p["b"]))[0] ** 2)


def nested_in_a_loop(p, x):
    """jax takes what no iteration changes out of the loop, in a cond of its own."""
    a, b = p["a"][0], p["b"][1]
    return jnp.mean(lax.scan(lambda h, _: (branch_in_branch(h, a, b), None), x, None, length=3)[0] ** 2)


def nested_in_nested_loops(p, x):
    def outer(h, w):
        a, b = w
        chosen = [lambda h: jnp.sin(h @ a), lambda h: jnp.sin(jnp.cos(h) @ b) @ a]

        def inner(h, v):
            deep = lambda h: lax.switch(jnp.int32(a[0, 0] > 0), chosen, h)  # noqa: E731
            return lax.cond(v > 0, deep, lambda h: jnp.exp(-(h**2)) @ jnp.tanh(a * v), h), None

        return lax.scan(inner, h, p["v"])[0], None

    return jnp.mean(lax.scan(outer, x, (p["a"], p["b"]))[0] ** 2)


def loop_with_branches_in_a_branch(p, x):
    def layers(h):
        def layer(h, w):
            return lax.cond(w[0][0, 0] > 0, lambda h: jnp.tanh(h @ w[0]), lambda h: jnp.sin(jnp.cos(h) @ w[1]), h), None

        return lax.scan(layer, h, (p["a"], p["b"]))[0]

    return jnp.mean(lax.cond(p["v"][0] > 0, layers, lambda h: jnp.sin(jnp.cos(h) @ p["b"][0]), x) ** 2)


NESTED = [
    twice_nested, thrice_nested, switch_in_switch, nested_in_layers, nested_in_layers_recomputed, nested_in_a_loop,
    nested_in_nested_loops, loop_with_branches_in_a_branch,
]  # fmt: skip


def nested_parameters(seed):
    """Signs, and so branches, are another for each layer and seed."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((3, 6, 6), np.float32),
        "b": rng.standard_normal((3, 6, 6), np.float32),
        "v": np.asarray([0.5, -0.25], np.float32),
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("loss", NESTED, ids=lambda f: f.__name__)
def test_branches_in_branches(loss):
    for seed in (3, 5):
        args = nested_parameters(seed), X[:6]
        assert_same_in_microbatches(step_of(loss), args, (2, 3), rtol=2e-4, rewrite=with_own_buffers)


@pytest.mark.parametrize(
    "options", [{"num_microbatches": 3, "num_stages": 1}, {"num_microbatches": 2, "num_stages": 2}]
)
def test_branches_in_branches_on_devices(options):
    p, x = nested_parameters(3), X[:6]
    step = step_of(twice_nested)
    got = autopar.parallelize(step, cluster=CLUSTER, **options)(p, x)
    assert_trees_same(got, step(p, x), rtol=1e-4)


@pytest.mark.slow
def test_stages_keep_the_lines_of_branches_that_were_traced_again():
    """Regions keep the marks of the trace that gave them buffers; a later trace reads them."""

    def loss(p, x):
        h = lax.cond(p["a"][0, 0] > 0, lambda h: jnp.tanh(h @ p["a"]), lambda h: jnp.sin(jnp.cos(h) @ p["b"]), x)
        return jnp.mean(lax.cond(p["a"][0, 0] > 0, lambda h: jnp.exp(-(h**2)), lambda h: jnp.cos(h) @ p["a"], h) ** 2)

    p, x = {"a": W, "b": W.T.copy()}, X[:6]
    step = step_of(loss)
    got = autopar.parallelize(step, cluster=CLUSTER, num_stages=2, num_microbatches=1)(p, x)
    assert_trees_same(got, step(p, x), rtol=1e-4)
