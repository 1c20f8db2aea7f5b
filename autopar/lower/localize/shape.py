"""Localizers of primitives that name sizes or positions: these become the piece's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar.lower.localize.base import LocalContext, Localizer, bind


def reshape(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Reshape the piece to the result's piece."""
    return bind(primitive, {**params, "new_sizes": context.result_shape()}, operands)


def broadcast_in_dim(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """Broadcast the piece to the result's piece."""
    return bind(primitive, {**params, "shape": context.result_shape()}, operands)


def iota(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Count from the start of this device's piece."""
    dim, shape = params["dimension"], context.result_shape()
    if not context.result_layouts[0].dims[dim]:
        return bind(primitive, {**params, "shape": shape}, operands)
    # Counted as integers: a start that a narrow float cannot hold would shift every element.
    count = lax.add(lax.broadcasted_iota(jnp.int32, shape, dim), context.result_start(0, dim))
    return [lax.convert_element_type(count, params["dtype"])]


def slice_(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Dims that are split are taken whole: their limit is the piece's size."""
    limits = tuple(
        n if axes else limit
        for n, axes, limit in zip(
            context.operand_shape(0), context.operand_layouts[0].dims, params["limit_indices"], strict=True
        )
    )
    return bind(primitive, {**params, "limit_indices": limits}, operands)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(
    {"broadcast_in_dim": broadcast_in_dim, "iota": iota, "reshape": reshape, "slice": slice_}
)
