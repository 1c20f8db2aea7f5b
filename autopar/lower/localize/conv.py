"""Localizer of ``conv_general_dilated``: a device has its share of the groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.core import Primitive

from autopar.lower.localize.base import LocalContext, Localizer, bind


def conv_general_dilated(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The convolution of the pieces, with as many feature groups and batch groups as the pieces hold.

    With groups, the input's grouped dim is split only by them, so its pieces count the devices that share them.
    """
    batch, feature = params["dimension_numbers"].lhs_spec[:2]
    whole, local = context.operand_types[0].shape, context.operand_shape(0)
    counts = {}
    for name, dim in (("feature_group_count", feature), ("batch_group_count", batch)):
        if params[name] > 1:
            counts[name] = params[name] * local[dim] // whole[dim]
    return bind(primitive, {**params, **counts}, operands)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
