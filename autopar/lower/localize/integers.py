"""Localizer of the upper half of a product of integers, which XLA does not take from a manual region of a program."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar.lower.localize.base import LocalContext, Localizer


def upper_half(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """The upper half of each product of twice as many bits, from products of halves of the operands."""
    del primitive, params, context
    x, y = map(jnp.asarray, operands)
    bits = 8 * x.dtype.itemsize
    unsigned: Any = jnp.dtype(f"uint{bits}")
    half, mask = unsigned.type(bits // 2), unsigned.type(2 ** (bits // 2) - 1)
    a, b = (lax.bitcast_convert_type(v, unsigned) for v in (x, y))
    (a1, a0), (b1, b0) = ((lax.shift_right_logical(v, lax.full_like(v, half)), v & mask) for v in (a, b))

    def carried(v: Any) -> Any:
        return lax.shift_right_logical(v, lax.full_like(v, half))

    # No sum exceeds the type: (2^h - 1)^2 + 2 (2^h - 1) = 2^2h - 1.
    middle = a1 * b0 + carried(a0 * b0)
    upper = a1 * b1 + carried(middle) + carried(a0 * b1 + (middle & mask))
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        zero = lax.full_like(a, 0)
        upper = upper - lax.select(x < 0, b, zero) - lax.select(y < 0, a, zero)
    return [lax.bitcast_convert_type(upper, x.dtype)]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"mulhi": upper_half})
