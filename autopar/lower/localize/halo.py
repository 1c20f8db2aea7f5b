"""The edges of a shard that windows of its neighbours cover: sent, put together, and their gradients sent back."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.lower.localize.base import LocalContext, as_bytes, permuted
from autopar.sharding.halo import Halo, Reach


def reach_of(halo: Halo, axes: tuple[str, ...], context: LocalContext) -> Reach:
    """Rows of its neighbours that a shard of a dim split over ``axes`` needs."""
    reach = halo.reach(math.prod(context.sizes[a] for a in axes))
    assert reach is not None, f"no strategy splits {halo} over {axes}"
    return reach


def covered(
    shard: Any,
    dim: int,
    halo: Halo,
    axes: tuple[str, ...],
    context: LocalContext,
    fill: Any = None,
    ends: tuple[Any, Any] | None = None,
) -> tuple[Any, Reach]:
    """The elements under the windows of this device.

    Args:
        shard: of this device.
        dim: over which the windows slide.
        halo: the windows.
        axes: mesh axes that split the dim, major first.
        context: where shards lie.
        fill: what lies beyond the ends of the dim; None: zeros, or where ``halo`` wraps the other end.
        ends: of the devices at either end, what lies beyond it; None: ``fill``.
    """
    reach = reach_of(halo, axes, context)
    parts = [shard]
    if reach.left:
        edge = lax.slice_in_dim(shard, shard.shape[dim] - reach.left, None, axis=dim)
        sent = _neighbours(edge, axes, 1, context, wraps=halo.wraps)
        if ends is not None:
            sent = jnp.where(at_end(axes, context)[0], _as_many(ends[0], sent, dim, last=True), sent)
        parts.insert(0, sent)
    if reach.right:
        edge = lax.slice_in_dim(shard, 0, reach.right, axis=dim)
        sent = _neighbours(edge, axes, -1, context, wraps=halo.wraps)
        if ends is not None:
            sent = jnp.where(at_end(axes, context)[1], _as_many(ends[1], sent, dim, last=False), sent)
        parts.append(sent)
    extended = lax.concatenate(parts, dim) if len(parts) > 1 else shard
    start = _start(reach, axes, context)
    if reach.outside and fill is not None:
        first = context.index(axes) * shard.shape[dim] - reach.left
        at = lax.broadcasted_iota(jnp.int32, extended.shape, dim) + first
        extended = jnp.where((at >= 0) & (at < halo.size), extended, jnp.asarray(fill, extended.dtype))
    if reach.width == extended.shape[dim]:
        return extended, reach
    return lax.dynamic_slice_in_dim(extended, start, reach.width, dim), reach


def at_end(axes: tuple[str, ...], context: LocalContext) -> tuple[Any, Any]:
    """Whether this device has the first, and the last shard of a dim that ``axes`` split."""
    index = context.index(axes)
    return index == 0, index == math.prod(context.sizes[a] for a in axes) - 1


def _as_many(end: Any, like: Any, dim: int, *, last: bool) -> Any:
    """An end with as many elements as ``like``: its own are the last or the first of them, zeros the others."""
    missing = like.shape[dim] - end.shape[dim]
    config = [(0, 0, 0)] * end.ndim
    config[dim] = (missing, 0, 0) if last else (0, missing, 0)
    return lax.pad(end, jnp.zeros((), end.dtype), config)


def returned(gradient: Any, dim: int, size: int, halo: Halo, axes: tuple[str, ...], context: LocalContext) -> Any:
    """Gradient of this device's elements, from those of the elements under all windows.

    Args:
        gradient: for the elements that `covered` gives.
        dim: over which the windows slide.
        size: elements of the dim on one device.
        halo: the windows.
        axes: mesh axes that split the dim, major first.
        context: where shards lie.
    """
    reach = reach_of(halo, axes, context)
    shape = list(gradient.shape)
    shape[dim] = reach.left + size + reach.right
    if reach.width != shape[dim]:
        empty = jnp.zeros(shape, gradient.dtype)
        gradient = lax.dynamic_update_slice_in_dim(empty, gradient, _start(reach, axes, context), dim)
    mine = lax.slice_in_dim(gradient, reach.left, reach.left + size, axis=dim)
    if reach.left:
        edge = _neighbours(lax.slice_in_dim(gradient, 0, reach.left, axis=dim), axes, -1, context)
        mine = _added(mine, edge, size - reach.left, dim)
    if reach.right:
        edge = _neighbours(lax.slice_in_dim(gradient, reach.left + size, None, axis=dim), axes, 1, context)
        mine = _added(mine, edge, 0, dim)
    return mine


def _added(shard: Any, edge: Any, at: int, dim: int) -> Any:
    part = lax.slice_in_dim(shard, at, at + edge.shape[dim], axis=dim)
    return lax.dynamic_update_slice_in_dim(shard, part + edge, at, dim)


def _start(reach: Reach, axes: tuple[str, ...], context: LocalContext) -> Any:
    """Start of the elements under the windows of this device."""
    if len(set(reach.starts)) == 1:
        return reach.starts[0]
    return jnp.asarray(reach.starts, jnp.int32)[context.index(axes)]


def _neighbours(edge: Any, axes: tuple[str, ...], by: int, context: LocalContext, *, wraps: bool = False) -> Any:
    """The edge of the device ``by`` places before, around the circle if that ``wraps``; zeros where there is none."""
    count = math.prod(context.sizes[a] for a in axes)
    pairs = [(n, (n + by) % count) for n in range(count) if wraps or 0 <= n + by < count]
    return context.send(lambda e: as_bytes(lambda a: permuted(a, axes, pairs, context.index), e), edge)
