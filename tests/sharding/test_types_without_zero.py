"""Values of types without a zero are never partial sums, of which devices hold zeros but for one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.ir.types import has_zero
from tests.fuzz.check import MIDDLE, random_plan


def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    """Scales of 8 bits that are made inside, broadcast and turned."""
    scales = (jnp.ones((8, 1), jnp.bfloat16) * 2).astype(jnp.float8_e8m0fnu)
    stacked = jnp.broadcast_to(scales[None], (4, 8, 1)).transpose(1, 0, 2).reshape(8, 4)
    return (x @ w) * stacked.astype(jnp.float32)


@pytest.mark.parametrize("seed", range(4))
def test_scales_of_drawn_plans_are_those_of_the_plain_function(seed: int) -> None:
    w, x = jnp.ones((8, 4)), jnp.arange(64.0).reshape(8, 8)
    options = ParallelOptions(cluster=MIDDLE, mesh_shape=(2, 4), search=random_plan(seed), num_stages=1)
    compiled = parallelize_with(scaled, options).compile(w, x)
    np.testing.assert_allclose(compiled(w, x), jax.jit(scaled)(w, x), 1e-6)
    types = {v.type.dtype for op in compiled.traced.graph.operators for v in op.results}
    assert not has_zero("f8_e8m0fnu") and "f8_e8m0fnu" in types
    records = {record.id: record for record in compiled.plan.content.operators}
    for op in compiled.traced.graph.operators:
        layouts = records[op.id].results if op.id in records else ()
        assert all(
            has_zero(v.type.dtype) or "sum" not in layout for v, layout in zip(op.results, layouts, strict=False)
        )
