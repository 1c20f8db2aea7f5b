"""Slices of stacks that a loop converts: compilers must not convert the stacks before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.build import build_graph
from autopar.ir.loops import Scan
from autopar.lower.values import converted_inside


def test_slices_that_are_converted_stay_as_they_are_until_then() -> None:
    """Also behind a barrier, as recomputed layers have it; what is taken in float32 is left alone."""

    def f(x, one, two, three):
        def body(carry, rows):
            w, (v, bias) = rows[0], lax.optimization_barrier(rows[1:])
            return carry @ w.astype(jnp.bfloat16) @ v.astype(jnp.bfloat16) + bias.sum().astype(jnp.bfloat16), None

        return lax.scan(body, x, (one, two, three))[0]

    shapes = (jnp.zeros((4, 4), jnp.bfloat16), *(jnp.zeros((6, 4, 4)),) * 3)
    graph = build_graph(jax.make_jaxpr(f)(*shapes), "f").graph
    scan = Scan.of(next(op for op in graph.operators if op.primitive == "scan"))
    rows = [jax.random.normal(jax.random.key(n), (4, 4)) for n in range(3)]
    text = str(jax.make_jaxpr(lambda *a: converted_inside(a, scan))(*rows))
    assert text.count("optimization_barrier") == 2
    assert text.count("u32[4,4] = bitcast_convert_type") == 2
    for got, want in zip(converted_inside(rows, scan), rows, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
