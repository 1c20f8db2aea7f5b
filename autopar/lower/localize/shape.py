"""Localizers of primitives that name sizes or positions: these become the shard's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.lower.localize.halo import covered
from autopar.sharding.halo import Halo
from autopar.sharding.rules.shape import rolled


def reshape(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Reshape the shard to the result's shard."""
    return bind(primitive, {**params, "new_sizes": context.result_shape()}, operands)


def broadcast_in_dim(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """Broadcast the shard to the result's shard."""
    return bind(primitive, {**params, "shape": context.result_shape()}, operands)


def iota(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Count from the start of this device's shard."""
    dim, shape = params["dimension"], context.result_shape()
    if not context.result_layouts[0].dims[dim]:
        return bind(primitive, {**params, "shape": shape}, operands)
    # Counted as integers: a start that a narrow float cannot hold would shift every element.
    count = lax.add(lax.broadcasted_iota(jnp.int32, shape, dim), context.result_start(0, dim))
    return [lax.convert_element_type(count, params["dtype"])]


def pad(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """The elements of this device: of dims that are split and padded some come from neighbours."""
    shard, value = operands
    config = [tuple(amounts) for amounts in params["padding_config"]]
    zero = isinstance(value, np.ndarray | np.generic) and not value.any()
    for dim, axes in enumerate(context.operand_layouts[0].dims):
        if axes and config[dim] != (0, 0, 0):
            sizes, counts = context.operand_types[0].shape, context.result_types[0].shape
            halo = Halo.padded(sizes[dim], counts[dim], config[dim])
            shard, reach = covered(shard, dim, halo, axes, context, None if zero else value)
            config[dim] = (reach.low, reach.high, config[dim][2])
    return bind(primitive, {**params, "padding_config": tuple(config)}, [shard, value])


def slice_(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """The elements of this device; of dims that are split and not taken whole some come from neighbours."""
    (shard,) = operands
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = list(params["strides"] or (1,) * len(starts))
    whole, counts = context.operand_types[0].shape, context.result_types[0].shape
    for dim, axes in enumerate(context.operand_layouts[0].dims):
        if not axes:
            continue
        if (starts[dim], limits[dim], strides[dim]) != (0, whole[dim], 1):
            halo = Halo.taken(whole[dim], counts[dim], starts[dim], strides[dim])
            shard, _ = covered(shard, dim, halo, axes, context)
        starts[dim], limits[dim] = 0, shard.shape[dim]
    given = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
    return bind(primitive, {**params, **given}, [shard])


def roll(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """The elements of this device; where the dim is split those at an edge come from the next one on the circle."""
    (shard,), dim, axes = operands, params["dim"], context.operand_layouts[0].dims[params["dim"]]
    if not axes:
        return [jnp.roll(shard, params["shift"], dim)]
    return [covered(shard, dim, rolled(context.operand_types[0].shape[dim], params["shift"]), axes, context)[0]]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(
    {"broadcast_in_dim": broadcast_in_dim, "iota": iota, "pad": pad, "reshape": reshape, "roll": roll, "slice": slice_}
)
