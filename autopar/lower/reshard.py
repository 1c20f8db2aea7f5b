"""Runs resharding steps. PROVISIONAL"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.cluster import LogicalMesh
from autopar.sharding.reshard import Step


def apply_steps(steps: Sequence[Step], x: Any, mesh: LogicalMesh) -> Any:
    for s in steps:
        n = 1
        for a in s.axes:
            n *= mesh.sizes[a]
        if s.kind == "all-reduce":
            if s.reduce == "sum":
                x = lax.psum(x, s.axes)
            elif s.reduce in ("max", "or"):
                x = lax.pmax(x.astype(jnp.int32), s.axes).astype(x.dtype) if x.dtype == bool else lax.pmax(x, s.axes)
            else:
                x = lax.pmin(x.astype(jnp.int32), s.axes).astype(x.dtype) if x.dtype == bool else lax.pmin(x, s.axes)
        elif s.kind == "reduce-scatter":
            x = lax.psum_scatter(x, s.axes, scatter_dimension=s.dim, tiled=True)
        elif s.kind == "all-gather":
            x = lax.all_gather(x, s.axes, axis=s.dim, tiled=True)
        elif s.kind == "all-to-all":
            x = lax.all_to_all(x, s.axes, split_axis=s.to_dim, concat_axis=s.dim, tiled=True)
        elif s.kind == "slice":
            size = x.shape[s.dim] // n
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(s.axes) * size, size, s.dim)
        elif s.kind == "mask":
            x = jnp.where(lax.axis_index(s.axes) == 0, x, jnp.zeros_like(x))
    return x
