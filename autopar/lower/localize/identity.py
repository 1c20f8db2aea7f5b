"""Localizers of primitives that only place values: our layouts say where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.core import Primitive

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.microbatch import AXIS


def pass_on(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """The operands themselves. A user's sharding names a mesh that is not there inside a manual program."""
    return list(operands)


def kept_in_microbatches(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The operands themselves. In a microbatch, which is still to be planned, the user's constraint is kept."""
    return bind(primitive, params, operands) if AXIS in context.sizes else pass_on(primitive, params, operands, context)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType(
    {
        **dict.fromkeys(("device_put", "mesh_cast", "reshard", "stage_boundary", "wire"), pass_on),
        "sharding_constraint": kept_in_microbatches,
    }
)
