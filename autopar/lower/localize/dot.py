"""Localizer of ``dot_general``: of a fixed matrix with a band a device has its part, and edges come from neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.lower.localize.halo import covered
from autopar.sharding.halo import Halo, Reach
from autopar.sharding.rules.dot import band


def dot_general(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The product of the shards; where the dim is split that a fixed matrix maps, with the rows of this device."""
    banded = None if context.op is None else band(context.op)
    if banded is None:
        return bind(primitive, params, operands)
    side, halo = banded
    dims = params["dimension_numbers"][0]
    (dim,), (row,) = dims[side], dims[1 - side]
    axes = context.operand_layouts[side].dims[dim]
    if not axes:
        return bind(primitive, params, operands)
    given = list(operands)
    given[side], reach = covered(operands[side], dim, halo, axes, context)
    given[1 - side] = _part(operands[1 - side], row, halo, reach, axes, context)
    return bind(primitive, params, given)


def _part(columns: Any, row: int, halo: Halo, reach: Reach, axes: tuple[str, ...], context: LocalContext) -> Any:
    """The rows of a device's columns for the elements under its windows; zeros for those beyond the ends of the dim."""
    size = halo.size // math.prod(context.sizes[a] for a in axes)
    firsts = [n * size - reach.left + start for n, start in enumerate(reach.starts)]
    low, high = max(0, -min(firsts)), max(0, max(firsts) + reach.width - halo.size)
    amounts = [(0, 0), (0, 0)]
    amounts[row] = (low, high)
    first = jnp.asarray(firsts, jnp.int32)[context.index(axes)] + low
    return lax.dynamic_slice_in_dim(jnp.pad(columns, amounts), first, reach.width, row)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"dot_general": dot_general})
