"""Prints and callbacks run once, as on one device; those that need an order are refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from tests.api.steps import CLUSTER

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)
X = jnp.arange(16.0).reshape(8, 2)


def test_a_print_comes_once(capfd):
    def step(x):
        jax.debug.print("sum {}", x.sum())
        return x * 2

    f = parallelize(step)
    for _ in range(2):
        f(X).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 120.0\nsum 120.0\n"


def test_callbacks_run_once():
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(("debug", float(v))), x.mean())
        y = io_callback(lambda v: seen.append(("io", v.shape)) or v.sum(), jax.ShapeDtypeStruct((), jnp.float32), x)
        flag = io_callback(lambda v: np.bool_(True), jax.ShapeDtypeStruct((), jnp.bool_), x)
        z = jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        io_callback(lambda v: seen.append(("none", float(v))), None, x.max())
        return y, z.sum(0), flag

    y, z, flag = parallelize(step)(X)
    jax.effects_barrier()
    assert float(y) == 120 and list(z) == [112, 128] and bool(flag)
    assert sorted(seen) == [("debug", 7.5), ("io", (8, 2)), ("none", 15.0)]


def test_callbacks_in_a_loop_and_a_gradient():
    seen = []

    def loss(w, x):
        def body(c, row):
            jax.debug.callback(lambda v: seen.append(float(v)), row.sum())
            return c + row.sum() * w, None

        return jax.lax.scan(body, 0.0, x)[0]

    value, grad = parallelize(jax.value_and_grad(loss))(2.0, X)
    jax.effects_barrier()
    assert float(value) == 240 and float(grad) == 120
    assert sorted(seen) == sorted(float(r.sum()) for r in X)


@pytest.mark.parametrize("kind", ["print", "io"])
def test_ordered_effects_are_refused_with_their_line(kind):
    def step(x):
        if kind == "print":
            jax.debug.print("{}", x.sum(), ordered=True)
        else:
            io_callback(lambda v: None, None, x.sum(), ordered=True)
        return x

    with pytest.raises(autopar.TraceError, match=r"at: test_effects.py:\d+.*step\)") as caught:
        parallelize(step)(X)
    assert "ordered" in str(caught.value)
