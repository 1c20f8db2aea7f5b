"""Branches of ``lax.platform_dependent``: the platform's is taken, and no other is lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

import autopar

#: Lowered on no platform, as a kernel of another one is not here.
_KERNEL = Primitive("kernel_of_another_platform")
_KERNEL.def_abstract_eval(lambda x: x)
ad.deflinear2(_KERNEL, lambda g, x: [_KERNEL.bind(g)])
batching.defvectorized(_KERNEL)


def _other(x):
    return _KERNEL.bind(jnp.cos(x))


def _named(x):
    return lax.platform_dependent(x, cpu=jnp.sin, tpu=_other)


def _default(x):
    return lax.platform_dependent(x, tpu=_other, cuda=_other, default=jnp.tanh)


def _both(x):
    return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tanh)


def _in_loop(x):
    return lax.scan(lambda h, _: (_named(h) + _default(h), None), x, None, length=3)[0]


def _in_branch(x):
    return lax.cond(jnp.sum(x) > 1e6, lambda x: jnp.exp(x), lambda x: _named(x) * 2, x)


def _in_manual_region(x):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    return jax.shard_map(lambda x: _default(x) + lax.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _step(function):
    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(function(x @ w[0]) @ w[1]))(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), loss

    return step


@pytest.mark.parametrize("function", [_named, _default, _in_loop, _in_branch, _in_manual_region, jax.vmap(_named)])
def test_a_branch_of_another_platform_is_not_lowered(x64, function):
    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=(16, 16)), draw.normal(size=(16, 16))), draw.normal(size=(16, 16))
    want = jax.jit(_step(function))(w, x)
    got = autopar.parallelize(_step(function), search="data-parallel")(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), got, want)


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"num_stages": 2, "num_microbatches": 2}])
def test_microbatches_and_stages_take_the_branch_of_the_platform(x64, options):
    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=(16, 16)), draw.normal(size=(16, 16))), draw.normal(size=(16, 16))
    want = jax.jit(_step(_both))(w, x)
    step = autopar.parallelize(_step(_both), **options)
    assert step.plan(w, x).num_microbatches == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), step(w, x), want)
    # The program has the sine of this platform and none of the others.
    if "num_stages" not in options:
        text = step.compile(w, x).as_text()
        assert "sine(" in text and "tanh(" not in text
