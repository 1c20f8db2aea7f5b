"""Localizers of ``gather``, ``scatter`` and ``dynamic_slice``.

Where an indexed dim is split, a device moves the indices to its own piece: position p of the whole is
position p - start of the shard. What then lies outside is another device's, unless it was outside of the
whole: the mode says what happens there, so that is settled before the move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer


@dataclass(frozen=True)
class Moved:
    """Indices of a shard.

    Args:
        indices: positions in the shard; outside of it for what lies elsewhere. Signed.
        upper: last position in the shard at which a window fits, by index component.
    """

    indices: jax.Array
    upper: tuple[int, ...]


def clamp_index(indices: Any, upper: Sequence[int]) -> jax.Array:
    """``indices`` with component i (last dim) clamped to [0, ``upper[i]``], in their own dtype."""
    # An index of a narrow type cannot pass a bound that its type does not hold.
    info: Any = jnp.iinfo
    most = info(indices.dtype).max
    zero, last = np.zeros((), indices.dtype), indices.ndim - 1
    # Bounds are scalars, not an array: traced again in a loop an array would be a constant that nothing makes.
    kept = [
        lax.clamp(zero, lax.slice_in_dim(indices, i, i + 1, axis=last), np.asarray(min(n, most), indices.dtype))
        for i, n in enumerate(upper)
    ]
    return lax.concatenate(kept, last) if kept else indices


def signed(indices: Any) -> jax.Array:
    """``indices`` as int32, or int64 from 64 bits: unsigned ones beyond it turn negative and stay out of bounds."""
    wide = jnp.dtype(indices.dtype).itemsize == 8
    return lax.convert_element_type(indices, jnp.int64 if wide else jnp.int32)


def move_index(
    indices: Any, dims: Sequence[int], windows: Sequence[int], routed: Sequence[int], context: LocalContext
) -> Moved:
    """Indices of the whole operand 0 as indices of this device's shard.

    Args:
        indices: the components are along the last dim.
        dims: dim of the operand that each component counts.
        windows: size of the window, by dim of the operand, in the whole.
        routed: dims, among ``dims``, that are split and in which one element is picked.
        context: where the shards lie.
    """
    local, whole = context.operand_shape(0), context.operand_types[0].shape
    moved = signed(indices)
    starts = [context.operand_start(0, d) if d in routed else jnp.zeros((), jnp.int32) for d in dims]
    start = lax.convert_element_type(jnp.stack(starts), moved.dtype)
    upper = tuple(local[d] - 1 if d in routed else whole[d] - windows[d] for d in dims)
    return Moved(lax.sub(moved, lax.broadcast_in_dim(start, moved.shape, (moved.ndim - 1,))), upper)


def _all_equal(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether ``a`` and ``b`` agree in all components (last dim)."""
    return jnp.all(lax.eq(a, b), axis=-1)


def gather(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Slices of the shard; over a split indexed dim the rows that lie here, and zeros for others.

    A row outside of the whole is filled by the first device of those that share the dim.
    """
    operand, indices = operands
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    whole, local, split = context.operand_types[0].shape, context.operand_shape(0), context.operand_layouts[0].dims
    windows = tuple(n if size == full else size for size, full, n in zip(sizes, whole, local, strict=True))
    dims = numbers.start_index_map
    routed = [d for d in dims if split[d] and sizes[d] != whole[d]]
    if not routed:
        if math.prod(indices.shape[:-1]) == 1 and params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
            # XLA makes it a slice: see `dynamic_slice`.
            indices = clamp_index(indices, [local[d] - windows[d] for d in dims])
        return bind(primitive, {**params, "slice_sizes": windows}, [operand, indices])

    upper = [whole[d] - sizes[d] for d in dims]
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    # In this mode jax itself converts first: what an index of 64 bits loses there, it loses here.
    given = lax.convert_element_type(indices, _index_dtype(whole)) if fills else indices
    clamped = clamp_index(given, upper)
    moved = move_index(clamped, dims, sizes, routed, context)
    inside = clamp_index(moved.indices, moved.upper)
    output = {
        **params,
        "slice_sizes": windows,
        "mode": lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        "fill_value": None,
        "indices_are_sorted": False,
        "unique_indices": False,
    }
    (rows,) = bind(primitive, output, [operand, inside])
    along = [d for d in range(rows.ndim) if d not in numbers.offset_dims]

    def by_row(mask: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(mask, rows.shape, along)

    inside_shard = _all_equal(moved.indices, inside)
    value = lax.select(by_row(inside_shard), rows, jnp.zeros_like(rows))
    if not fills:
        return [value]
    axes = tuple(axis for d in routed for axis in split[d])
    first = lax.broadcast_in_dim(context.index(axes) == 0, rows.shape, ())
    outside = lax.select(first, jnp.full_like(rows, params["fill_value"]), jnp.zeros_like(rows))
    return [lax.select(by_row(_all_equal(given, clamped)), value, outside)]


def _index_dtype(shape: tuple[int, ...]) -> Any:
    return jnp.int64 if max(shape, default=0) > np.iinfo(np.int32).max else jnp.int32


def scatter(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Updates of the shard; over a split indexed dim those that lie elsewhere are out of bounds and dropped."""
    operand, indices, updates = operands
    numbers = params["dimension_numbers"]
    whole, split = context.operand_types[0].shape, context.operand_layouts[0].dims
    alone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sliding = iter(context.operand_types[2].shape[u] for u in numbers.update_window_dims)
    windows = [1 if d in alone else next(sliding) for d in range(len(whole))]
    dims = numbers.scatter_dims_to_operand_dims
    routed = [d for d in dims if split[d] and windows[d] != whole[d]]
    if not routed:
        return bind(primitive, params, operands)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        indices = clamp_index(indices, [whole[d] - windows[d] for d in dims])
    moved = move_index(indices, dims, windows, routed, context)
    if math.prod(indices.shape[:-1]) == 1:
        # XLA makes a slice of a shard one slice of the whole, and forgets to clamp a start outside of the shard.
        operand = lax.optimization_barrier(operand)
    dropping = {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return bind(primitive, dropping, [operand, moved.indices, updates])


def dynamic_slice(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The slice of this device's shard: dims that are split are not sliced.

    Starts are clamped here: of a slice of a slice XLA makes one slice of the whole, and forgets to clamp the first.
    """
    array, *starts = operands
    sizes = context.result_shape()
    kept = [
        lax.clamp(jnp.zeros_like(i), i, jnp.full_like(i, whole - size))
        for i, whole, size in zip(starts, array.shape, sizes, strict=True)
    ]
    return bind(primitive, {**params, "slice_sizes": sizes}, [array, *kept])


_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "scatter_add",
             "scatter_max", "scatter_min", "scatter_mul", "scatter_sub")  # fmt: skip

LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(
    {"dynamic_slice": dynamic_slice, "gather": gather, **dict.fromkeys(_SCATTERS, scatter)}
)
