"""Localizers of attention in blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.core import Primitive

from autopar.ir.blockwise import ATTENTION, BACKWARD
from autopar.lower.localize.attention_passes import Backward, Forward
from autopar.lower.localize.base import LocalContext, Localizer
from autopar.lower.localize.blocks import Core
from autopar.lower.localize.causal import backward_in_halves, forward_in_halves


def attention(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Attention of this device's tokens to all keys."""
    core = Core(params, operands, context)
    return forward_in_halves(core) if context.skips_masked else Forward(core).run()


def attention_backward(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """Gradients of this device's queries, keys and values."""
    core = Core(params, operands, context)
    return backward_in_halves(core) if context.skips_masked else Backward(core).run()


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({ATTENTION: attention, BACKWARD: attention_backward})
