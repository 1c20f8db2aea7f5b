"""What a step may not have is refused with its line, not with an error of XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.end_to_end.clusters import MIDDLE


def test_shard_map():
    mesh = jax.make_mesh((8,), ("q",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def step(x):
        return jax.shard_map(lambda v: jax.lax.psum(v, "q"), mesh=mesh, in_specs=spec("q"), out_specs=spec())(x)

    with pytest.raises(autopar.TraceError, match=r"shard_map\n  at: test_refused.py:\d+"):
        autopar.parallelize(step, cluster=MIDDLE)(jnp.ones((8, 2)))
