"""Primitives that autopar binds by itself, found without private names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive


def _primitive_of_barrier() -> Primitive:
    jaxpr = jax.make_jaxpr(jax.lax.optimization_barrier)(jax.ShapeDtypeStruct((), jnp.float32))
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn.primitive


optimization_barrier_p: Primitive = _primitive_of_barrier()
