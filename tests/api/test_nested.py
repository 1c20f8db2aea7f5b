"""A decorated function inside of another trace acts as a jitted one, whatever it is given or closes over."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar import AutoparError
from tests.api.steps import CLUSTER, batch, params, sgd

X = np.arange(1, 9, dtype=np.float32)
MESH = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

#: By name a function of an array around a function ``f``, which is decorated, or jitted: the oracle.
OUTER = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x: f(x).sum()),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: (lambda out, back: back(out))(*jax.vjp(f, x)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap": lambda f: jax.vmap(f),
    "vmap with a name": lambda f: jax.vmap(f, axis_name="i"),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "scan": lambda f: lambda x: lax.scan(lambda c, t: (c + f(t).sum(), f(c)), 0.5, x),
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 3, lambda i, c: c + f(c) * i, x),
    "while_loop": lambda f: (
        lambda x: lax.while_loop(lambda s: (s[0] < 3) & (f(s[1]).sum() < 1e9), lambda s: (s[0] + 1, f(s[1])), (0, x))
    ),
    "cond": lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: lax.switch(1, [lambda x: x, f], x),
    "map": lambda f: lambda x: lax.map(f, x),
    "eval_shape": lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape),
    "make_jaxpr": lambda f: lambda x: jax.core.eval_jaxpr(*(lambda j: (j.jaxpr, j.consts))(jax.make_jaxpr(f)(x)), x)[0],
    "custom_vjp": lambda f: jax.grad(lambda x: custom(f)(x).sum()),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=jax.P("i"), out_specs=jax.P("i")),
    "jit of grad of vmap": lambda f: jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum())),
}


def custom(f):
    @jax.custom_vjp
    def g(x):
        return f(x)

    g.defvjp(lambda x: (f(x), x), lambda x, t: (t * f(x),))
    return g


#: By name what the inner function is given: what comes in, or arrays and numbers from outside.
GIVEN = {
    "argument": lambda f, x: f(x),
    "numpy": lambda f, x: x + f(np.float32(1.5)),
    "number": lambda f, x: x + f(2),
    "outside": lambda f, x: x * f(OUTSIDE),
    "closed over": lambda f, x: f(1.0, x),
    "mixed": lambda f, x: f(x, OUTSIDE),
}
OUTSIDE = jnp.float32(0.75)


def made(wrap, given):
    """A function around an inner one that ``wrap`` made, which closes over what it is given second."""
    one = wrap(lambda y: jnp.sin(y) * y)

    def inner(y, closed=None):
        if closed is None:
            return one(y)
        return wrap(lambda y: jnp.cos(y) * closed)(y)

    return lambda x: GIVEN[given](inner, x)


@pytest.mark.few(20)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("outer", OUTER)
def test_inside_of_another_trace(outer, given):
    got = OUTER[outer](made(lambda f: autopar.parallelize(f, cluster=CLUSTER), given))(X)
    want = OUTER[outer](made(jax.jit, given))(X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_function_that_has_run_before():
    inner = autopar.parallelize(jnp.sin, cluster=CLUSTER)
    ones = np.ones(8, np.float32)
    for _ in range(2):
        inner(ones)
    assert jax.jit(lambda x: x + inner(ones))(X)[0] == pytest.approx(1 + np.sin(1))
    assert inner(ones)[0] == pytest.approx(np.sin(1))


@pytest.mark.few(6)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"constraints": {"x": (0,)}}])
def test_decorated_inside_of_decorated(given, options):
    def step(wrap):
        inner = made(wrap, given)

        def fn(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.mean(inner(x @ w) ** 2))(w)

        return fn

    w, x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.ones((16, 8), np.float32)
    got = autopar.parallelize(step(lambda f: autopar.parallelize(f, cluster=CLUSTER)), cluster=CLUSTER, **options)(w, x)
    np.testing.assert_allclose(got, jax.jit(step(jax.jit))(w, x), rtol=1e-5, atol=1e-6)


def test_options_of_an_inner_function_are_told_by_the_plan_of_the_outer_one():
    inner = autopar.parallelize(lambda y: jnp.tanh(y), cluster=CLUSTER, constraints={"y": (0,)}, num_microbatches=1)
    plain = autopar.parallelize(lambda y: jnp.tanh(y))
    step = autopar.parallelize(lambda x: inner(inner(x)) + plain(x), cluster=CLUSTER)
    for _ in range(2):
        (told,) = [n for n in step.plan(X).notes if "decorated" in n]
        assert "cluster, num_microbatches, constraints have no effect" in told
    assert step(X).shape == (8,)


@pytest.mark.parametrize("outer", ["jit", "vmap", "scan", "eval_shape", "grad"])
def test_numbers_of_results_are_arrays_inside_too(outer):
    seen = []

    def around(x):
        seen.append(autopar.parallelize(lambda y: (1, y, np.ones(2)), cluster=CLUSTER)(x))
        return x.sum()

    OUTER[outer](around)(X)
    assert all(isinstance(leaf, jax.Array) for result in seen for leaf in jax.tree.leaves(result))


def test_a_whole_step_inside_of_jit_and_of_a_loop():
    step = autopar.parallelize(sgd, cluster=CLUSTER, donate_argnums=0)
    want = params()
    for _ in range(3):
        want, _ = sgd(want, batch())
    looped = jax.jit(lambda p: lax.fori_loop(0, 3, lambda i, p: step(p, batch())[0], p))(params())
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_state_of_a_pipeline_inside_of_another_trace_is_an_error():
    def step(state, x):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))

    state, x = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 8))}, jnp.ones((16, 8))
    piped = autopar.parallelize(step, cluster=CLUSTER, schedule="2bw", num_stages=2, num_microbatches=4)
    under_way = piped(state, x)
    with pytest.raises(AutoparError, match="state of a pipeline"):
        jax.jit(lambda x: piped(under_way, x))(x)
    assert jax.eval_shape(piped, state, x)["a"].shape == (8, 16)


@pytest.mark.parametrize("wrap", ["jit", "grad", "vmap", "map"])
def test_arguments_from_outside_are_traced_inside_as_those_of_a_jitted_function(wrap):
    """Methods of arrays on numpy's, and Python that asks whether a value is traced."""

    def inner(y):
        assert isinstance(y, jax.core.Tracer)
        return y.at[0].add(1.0).sum()

    step = autopar.parallelize(inner, cluster=CLUSTER)
    for given in (X, np.ones(3, np.float32), jnp.ones(3)):
        wanted = OUTER[wrap](lambda x, given=given: x * jax.jit(inner)(given))(X)
        result = OUTER[wrap](lambda x, given=given: x * step(given))(X)
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit, jax.checkpoint], ids=lambda t: t.__name__)
def test_a_function_inside_is_traced_as_often_as_a_jitted_one(transform):
    def traces(decorate):
        count = []

        def f(x, how):
            count.append(how)
            return (jnp.sin(x) * len(how)).sum()

        step = decorate(f, static_argnums=1)
        for how in ("a", "bc", "a"):
            for _ in range(2):
                transform(lambda x, how=how: step(x, how))(jnp.ones(4))
        return count

    assert traces(functools.partial(autopar.parallelize, cluster=CLUSTER)) == traces(jax.jit)


def test_a_function_inside_that_closes_over_values_of_other_traces():
    held = []
    step = autopar.parallelize(lambda x: x * held[-1], cluster=CLUSTER)

    def outer(x, scale):
        held.append(scale)
        return step(x).sum()

    for scale in (2.0, 3.0):
        np.testing.assert_allclose(jax.jit(outer)(np.ones(4), scale), 4 * scale)
        np.testing.assert_allclose(jax.grad(outer, argnums=1)(np.ones(4), scale), 4)
