"""Localizer of ``conv_general_dilated``: a device has its share of the groups, and edges of its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.core import Primitive

from autopar.lower.localize.base import LocalContext, Localizer, bind
from autopar.lower.localize.halo import covered
from autopar.sharding.rules.conv import windows


def conv_general_dilated(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The convolution of the pieces, with as many feature groups and batch groups as the pieces hold.

    With groups, the input's grouped dim is split only by them, so its pieces count the devices that share them. Of a
    spatial dim that is split the piece has what its windows cover, padded by what is left of a dilated element.
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
    for n, dim in enumerate(numbers.lhs_spec[2:]):
        axes = context.operand_layouts[0].dims[dim]
        if axes:
            taps = context.operand_types[1].shape[numbers.rhs_spec[2 + n]]
            count = context.result_types[0].shape[numbers.out_spec[2 + n]]
            steps = params["window_strides"][n], params["rhs_dilation"][n], params["lhs_dilation"][n]
            halo, _ = windows(whole[dim], taps, count, steps, padding[n][0])
            left, reach = covered(left, dim, halo, axes, context)
            padding[n] = (reach.low, reach.high)
    return bind(primitive, {**params, **changed, "padding": tuple(padding)}, [left, kernel])


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
