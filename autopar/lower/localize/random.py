"""Localizer of ``random_bits``: a device draws exactly the bits that its shard has in the whole draw.

With ``jax_threefry_partitionable`` (jax's default), element number i of a draw is
threefry2x32(key, (i >> 32, i & 0xffffffff)), its two words joined by xor, or side by side for 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.random import threefry2x32_p

from autopar._compat.primitives import bind
from autopar.lower.localize.base import LocalContext, Localizer

_LOW = 0xFFFFFFFF


def _word(value: int) -> jax.Array:
    return jnp.asarray(value, jnp.uint32)


def wide_product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of ``a * b`` modulo 2**64.

    Args:
        a: uint32 array.
        b: an integer of up to 64 bits.
    """
    half, mask = _word(16), _word(0xFFFF)
    b_high, b_low = _word((b >> 32) & _LOW), b & _LOW
    b1, b0 = _word(b_low >> 16), _word(b_low & 0xFFFF)
    a1, a0 = lax.shift_right_logical(a, jnp.full_like(a, half)), a & mask
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> half) + (p01 & mask) + (p10 & mask)
    low = (p00 & mask) | (middle << half)
    high = p11 + (p01 >> half) + (p10 >> half) + (middle >> half) + a * b_high
    return high, low


def counters(shape: Sequence[int], local: Sequence[int], starts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Row-major numbers, in the whole, of a shard's elements: high and low 32 bits, each uint32 of shape ``local``.

    Args:
        shape: shape of the whole draw.
        local: shape of the shard.
        starts: index in the whole of the shard's first element, by dim; int32 scalars.
    """
    high = low = jnp.zeros(tuple(local), jnp.uint32)
    for dim, start in enumerate(starts):
        stride = math.prod(shape[dim + 1 :])
        index = lax.broadcasted_iota(jnp.uint32, tuple(local), dim) + start.astype(jnp.uint32)
        if math.prod(shape) <= _LOW:
            low = low + index * _word(stride)
            continue
        more_high, more_low = wide_product(index, stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)
    return high, low


def _joined(first: jax.Array, second: jax.Array, bit_width: int) -> jax.Array:
    """The bits of an element from the two words of its block."""
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        high, low = first.astype(dtype), second.astype(dtype)
        return lax.shift_left(high, jnp.full_like(high, 32)) | low
    return (first ^ second).astype(dtype)


def random_bits(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """This device's shard of the draw; the whole draw, cut, where bits depend on the size of the draw."""
    (keys,) = operands
    if not context.is_split:
        return bind(primitive, params, operands)
    local = context.result_shape()
    starts = [context.result_start(0, dim) for dim in range(len(local))]
    config: Any = jax.config
    if not config.jax_threefry_partitionable:
        (whole,) = bind(primitive, params, operands)
        return [lax.dynamic_slice(whole, starts, local)]
    lead = keys.ndim
    words = jax.random.key_data(keys)
    block = (
        *(lax.broadcast_in_dim(words[..., i], local, tuple(range(lead))) for i in (0, 1)),
        *(
            lax.broadcast_in_dim(count, local, tuple(range(lead, len(local))))
            for count in counters(params["shape"], local[lead:], starts[lead:])
        ),
    )
    first, second = bind(threefry2x32_p, {}, list(block))
    return [_joined(first, second, params["bit_width"])]


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({"random_bits": random_bits})
