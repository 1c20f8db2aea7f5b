"""Localizer of ``conv_general_dilated``: a device has its share of the groups, and edges of its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.frontend.bordered import ends_of, gone_back, with_borders
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.lower.localize.halo import at_end, covered
from autopar.sharding.rules.conv import bordered, windows


def conv_general_dilated(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The convolution of the shards, with as many feature groups and batch groups as the shards hold.

    With groups, the input's grouped dim is split only by them, so its shards count the devices that share them. Of a
    spatial dim that is split the shard has what its windows cover, padded by what is left of a dilated element. Borders
    made of the array (`autopar.frontend.bordered`) are those of devices at the ends, or come around the circle.
    """
    numbers = params["dimension_numbers"]
    batch, feature = numbers.lhs_spec[:2]
    whole, local = context.operand_types[0].shape, context.operand_shape(0)
    changed: dict[str, Any] = {}
    for name, dim in (("feature_group_count", feature), ("batch_group_count", batch)):
        if params[name] > 1:
            changed[name] = params[name] * local[dim] // whole[dim]
    left, kernel = operands
    padding = list(params["padding"])
    borders: tuple[Any, ...] = params.get("borders") or (None,) * len(padding)
    for n, dim in enumerate(numbers.lhs_spec[2:]):
        axes, border = context.operand_layouts[0].dims[dim], borders[n]
        inside = border is not None and border[1] == "in"
        if axes:
            taps = context.operand_types[1].shape[numbers.rhs_spec[2 + n]]
            count = context.result_types[0].shape[numbers.out_spec[2 + n]]
            steps = params["window_strides"][n], params["rhs_dilation"][n], params["lhs_dilation"][n]
            halo, _ = windows(whole[dim], taps, count, steps, padding[n][0])
            ends = ends_of(left, dim, border) if inside and border[0] != "wrap" else None
            left, reach = covered(left, dim, bordered(halo, border), axes, context, ends=ends)
            padding[n] = (reach.low, reach.high)
        elif inside:
            left, padding[n] = with_borders(left, dim, border, params["lhs_dilation"][n])
    back = [(numbers.out_spec[2 + n], n) for n, border in enumerate(borders) if border and border[1] == "out"]
    for _, n in back:
        padding[n] = (padding[n][0] + borders[n][2], padding[n][1] + borders[n][3])
    plain = {k: v for k, v in params.items() if k != "borders"}
    (result,) = bind(lax.conv_general_dilated_p, {**plain, **changed, "padding": tuple(padding)}, [left, kernel])
    for dim, n in back:
        axes = context.result_layouts[0].dims[dim]
        result = gone_back(result, dim, borders[n], at_end(axes, context) if axes else (True, True))
    return [result]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
