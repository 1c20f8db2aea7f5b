"""What regions save for their backward pass under `jax.vmap(spmd_axis_name=...)` differs along the axis of the vmap."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.microbatch.running import numbers, run, traced

members = partial(jax.vmap, spmd_axis_name="x")


def region(fn, in_specs, out_specs):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def scaled(s, v):
    return members(region(lambda s, v: v * jnp.sin(s), (P(), P("y")), P("y")))(s, v)


def layer(s, v, over):
    return members(region(lambda w, v: lax.psum(jnp.tanh(v * w) * w, over), (P(), P("y")), P("y")))(s, v)


def in_branches(s, v):
    def body(c, t):
        return lax.cond(t > 1.5, lambda c: scaled(s * t, c), lambda c: scaled(jnp.cos(s), c * c), c), None

    return lax.scan(body, v, jnp.arange(1.0, 4.0))[0]


def in_carry(s, v):
    def body(c, t):
        return (jnp.cos(c[0]) * t, scaled(*c)), None

    return lax.scan(body, (s, v), jnp.arange(1.0, 4.0))[0][1]


def shifted(s, v):
    """All devices along y have the same in the end, which nothing but the values shows."""

    def sums(v):
        return sum(lax.ppermute(v, "y", [(i, (i + k) % 4) for i in range(4)]) for k in range(4))

    inner = region(sums, (P("x", "y"),), P("x", None))(v)
    return region(jnp.sin, (P("x", None),), P("x", None))(inner) * s[:, None]


FORMS = {
    "plain": scaled,
    "jit": jax.jit(scaled),
    "remat": jax.checkpoint(scaled),
    "scan": lambda s, v: lax.scan(lambda c, t: (scaled(s * t, c), c.sum()), v, jnp.arange(1.0, 4.0))[0],
    "carry": in_carry,
    "branches in a scan": in_branches,
    "sum over the other axis": partial(layer, over="y"),
    "loop inside": members(
        region(lambda s, v: lax.scan(lambda c, _: (jnp.sin(c * s), None), v, None, length=3)[0], (P(), P("y")), P("y"))
    ),
    "one for all": lambda s, v: members(region(lambda s, v: v * jnp.sin(s), (P(), P("y")), P("y")), in_axes=(None, 0))(
        s[0], v
    ),
    "same but not seen to be": shifted,
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_and_their_tangents(x64, name):
    s, v = jnp.array([0.5, 2.0]), jnp.asarray(np.random.default_rng(0).standard_normal((2, 16)))

    def grads(s, v):
        return jax.grad(lambda s, v: jnp.sum(FORMS[name](s, v) ** 2), (0, 1))(s, v)

    def step(s, v):
        return jax.jvp(grads, (s, v), (jnp.ones_like(s), v)) if name in ("plain", "remat") else grads(s, v)

    wanted = jax.tree.leaves(jax.jit(step)(s, v))
    found, leaves = traced(step, (s, v))
    for got, want in zip(map(numbers, run(found, leaves)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
