"""Localizer of ``ragged_dot_general``: a device has some of the rows, or the matrices of some of the groups.

Rows of a group lie after those of the groups before it. A device that has a shard of the rows counts those of each
group in its shard; one that has the matrices of some groups turns the rows so that those of its groups come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer


def ragged_dot_general(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The products of the groups' rows that lie here with the matrices that lie here; zeros for other rows."""
    numbers = params["ragged_dot_dimension_numbers"]
    ((contracted, _), (batch, _)), (rows,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    left, right, sizes = operands
    if rows in batch or sizes.ndim > 1:  # rows and groups are whole
        return bind(primitive, params, operands)
    is_summed = rows in contracted
    if is_summed:
        group_axes = context.result_layouts[0].dims[0]
        groups = context.result_shape()[0]
    else:
        (group,) = numbers.rhs_group_dimensions
        group_axes, groups = context.operand_layouts[1].dims[group], context.operand_shape(1)[group]
    row_axes = context.operand_layouts[0].dims[rows]
    if not group_axes and not row_axes:
        return bind(primitive, params, operands)

    count = left.shape[rows]
    sizes = _of_rows(sizes, context.operand_start(0, rows), count)
    if not group_axes:
        return bind(primitive, params, [left, right, sizes])
    first = context.piece_start(group_axes, groups)
    start = lax.dynamic_index_in_dim(jnp.cumsum(sizes) - sizes, first, keepdims=False)
    mine = lax.dynamic_slice_in_dim(sizes, first, groups)
    turned = jnp.roll(left, -start, rows)
    if is_summed:
        (_, right_contracted), _ = numbers.dot_dimension_numbers
        right_rows = right_contracted[contracted.index(rows)]
        return bind(primitive, params, [turned, jnp.roll(right, -start, right_rows), mine])
    (product,) = bind(primitive, params, [turned, right, mine])
    # The result has the dims of a batch in front, then those of the left that are not summed.
    dim = len(batch) + sum(d < rows for d in range(left.ndim) if d not in contracted and d not in batch)
    there = lax.lt(lax.broadcasted_iota(jnp.int32, product.shape, dim), lax.convert_element_type(mine.sum(), jnp.int32))
    return [jnp.roll(lax.select(there, product, jnp.zeros_like(product)), start, dim)]


def _of_rows(sizes: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Rows of each group among ``count`` from ``start`` on; rows without a group are after them."""
    ends = jnp.cumsum(sizes) - lax.convert_element_type(start, sizes.dtype)
    return jnp.clip(ends, 0, count) - jnp.clip(ends - sizes, 0, count)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"ragged_dot_general": ragged_dot_general})
