"""Localizers of sliding windows: a device has its share of the windows, and edges of its neighbours under them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.lower.localize.halo import covered, returned
from autopar.sharding.halo import Halo


def _windows(params: Mapping[str, Any], dim: int, size: int, count: int) -> Halo:
    ones = (1,) * len(params["window_dimensions"])
    spread, base = params.get("window_dilation") or ones, params.get("base_dilation") or ones
    steps = params["window_strides"][dim], spread[dim], base[dim]
    return Halo.sliding(size, count, params["window_dimensions"][dim], steps, params["padding"][dim][0])


def _moving(params: Mapping[str, Any], dim: int) -> bool:
    """Whether windows slide over a dim."""
    ones = (1,) * len(params["window_dimensions"])
    base = params.get("base_dilation") or ones
    here = params["window_dimensions"][dim], params["window_strides"][dim], base[dim]
    return here != (1, 1, 1) or tuple(params["padding"][dim]) != (0, 0)


def reduce_window(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The windows of this device; what lies beyond the ends of a dim has no part in their sum, or largest element."""
    (shard,) = operands
    layout, padding = context.operand_layouts[0], list(params["padding"])
    for dim, axes in enumerate(layout.dims):
        if axes and _moving(params, dim):
            halo = _windows(params, dim, context.operand_types[0].shape[dim], context.result_types[0].shape[dim])
            shard, reach = covered(shard, dim, halo, axes, context, _neutral(primitive.name, shard.dtype))
            padding[dim] = (reach.low, reach.high)
    return bind(primitive, {**params, "padding": tuple(padding)}, [shard])


def _neutral(primitive: str, dtype: Any) -> Any:
    """The element that leaves a window's result unchanged."""
    if primitive == "reduce_window_sum":
        return 0
    lowest = primitive == "reduce_window_max"
    if dtype == jnp.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = np.iinfo(dtype)
        return limits.min if lowest else limits.max
    return -jnp.inf if lowest else jnp.inf


def select_and_scatter_add(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The gradients of this device's windows; those for elements of neighbours are sent back to them.

    Beyond the ends of a dim nothing is selected, and what is returned from there goes nowhere.
    """
    source, values = operands
    padding, moved = list(params["padding"]), []
    whole, sizes = context.operand_types, context.operand_shape(1)
    for dim, axes in enumerate(context.operand_layouts[1].dims):
        if axes and _moving(params, dim):
            halo = _windows(params, dim, whole[1].shape[dim], whole[0].shape[dim])
            lowest = "reduce_window_max" if params["select_prim"].name == "ge" else "reduce_window_min"
            values, reach = covered(values, dim, halo, axes, context, _neutral(lowest, values.dtype))
            padding[dim] = (reach.low, reach.high)
            moved.append((dim, halo, axes))
    (gradient,) = bind(primitive, {**params, "padding": tuple(padding)}, [source, values])
    for dim, halo, axes in reversed(moved):
        gradient = returned(gradient, dim, sizes[dim], halo, axes, context)
    return [gradient]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(
    {
        "reduce_window_max": reduce_window,
        "reduce_window_min": reduce_window,
        "reduce_window_sum": reduce_window,
        "select_and_scatter_add": select_and_scatter_add,
    }
)
