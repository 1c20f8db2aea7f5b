"""Operands of products in 8 bits: one scale a tensor, or a power of two for each block of 32 (MX).

    one scale:  q(x) = E4M3(x s), s = 448 / max|x|;  cotangents E5M2(x s), s = 57344 / max|x|
                a b ~ (q(a) q(b)) / (s_a s_b), added up in float32
    blocks:     s = 2^(floor(log2 max|block|) - 8) along the dim that is summed over, x ~ s E4M3(x / s)

Micikevicius et al., "FP8 formats for deep learning", 2022; Rouhani et al., "Microscaling data formats", 2023. What a
block decodes to has 4 significant bits: bfloat16 has it exactly, and products of those are MX products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

#: Elements of a block that has a scale of its own (MX).
BLOCK = 32

#: Largest exponent of E4M3.
_LARGEST_EXPONENT = 8
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class EightBitFormat:
    """A format of 8 bits.

    Args:
        dtype: of the codes.
        top: the largest number.
    """

    dtype: Any
    top: float


VALUES = EightBitFormat(jnp.float8_e4m3fn, 448.0)
COTANGENTS = EightBitFormat(jnp.float8_e5m2, 57344.0)


class Scales(Protocol):
    """Says what tensors are multiplied by before they are rounded."""

    def of(self, x: Any, format: EightBitFormat) -> Any:
        """The float32 scalar that ``x`` is multiplied by before it is rounded to ``format``."""

    def inside(self) -> Scales:
        """Scales for the body of a loop that is traced now."""

    def seen(self) -> list[Any]:
        """Largest absolute elements of the tensors of a loop's body, which the loop returns for `take`."""

    def take(self, stacked: Sequence[Any]) -> None:
        """Stores the largest absolute elements that a loop returned, stacked over its iterations."""


@dataclass(frozen=True)
class CurrentScales:
    """Current scaling: the scale of a tensor is computed from the tensor itself."""

    def of(self, x: Any, format: EightBitFormat) -> Any:
        """The float32 scalar that ``x`` is multiplied by before it is rounded to ``format``."""
        return scale_for(largest(x), format.top, jnp.float32(1))

    def inside(self) -> CurrentScales:
        """Scales for the body of a loop that is traced now."""
        return self

    def seen(self) -> list[Any]:
        """Largest absolute elements of the tensors of a loop's body, which the loop returns for `take`."""
        return []

    def take(self, stacked: Sequence[Any]) -> None:
        """Stores the largest absolute elements that a loop returned, stacked over its iterations."""


@dataclass
class DelayedScales:
    """Delayed scaling: scales from earlier steps, one for each tensor in program order; iterations of a loop share one.

    Args:
        scales: float32 array with one for each; None takes 1 for all, to count them.
        first: number of the first tensor.
        amaxes: largest element of each tensor so far.
        tops: largest number of the format of each.
    """

    scales: Any
    first: int = 0
    amaxes: list[Any] = field(default_factory=list)
    tops: list[float] = field(default_factory=list)
    _body: DelayedScales | None = None

    def of(self, x: Any, format: EightBitFormat) -> Any:
        """The float32 scalar that ``x`` is multiplied by before it is rounded to ``format``."""
        number = self.first + len(self.amaxes)
        self.amaxes.append(largest(x))
        self.tops.append(format.top)
        return jnp.float32(1) if self.scales is None else self.scales[number]

    def inside(self) -> DelayedScales:
        """Scales for the body of a loop that is traced now."""
        self._body = DelayedScales(self.scales, self.first + len(self.amaxes))
        return self._body

    def seen(self) -> list[Any]:
        """Largest absolute elements of the tensors of a loop's body, which the loop returns for `take`."""
        return self.amaxes

    def take(self, stacked: Sequence[Any]) -> None:
        """Stores the largest absolute elements that a loop returned, stacked over its iterations."""
        self.amaxes += [jnp.max(each) for each in stacked]
        self.tops += [] if self._body is None else self._body.tops


def largest(x: Any) -> Any:
    """The largest absolute element, a float32 scalar."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_for(amax: Any, top: Any, otherwise: Any) -> Any:
    """The scale that makes ``amax`` the largest number of a format; ``otherwise`` where it is 0 or not finite."""
    usable = (amax > 0) & jnp.isfinite(amax)
    return jnp.where(usable, top / jnp.where(usable, amax, 1), otherwise)


def coded(x: Any, scale: Any, format: EightBitFormat) -> Any:
    """Scales a tensor, saturates it to the format's range, and casts it to 8 bits."""
    return jnp.clip(x.astype(jnp.float32) * scale, -format.top, format.top).astype(format.dtype)


def rounded_in_blocks(x: Any, dim: int) -> Any:
    """A tensor as blocks of `BLOCK` elements along a dim hold it, in bfloat16.

    Args:
        x: its size along ``dim`` is a multiple of `BLOCK`.
        dim: that a product sums over.
    """
    shape = x.shape
    blocks = x.astype(jnp.float32).reshape(*shape[:dim], shape[dim] // BLOCK, BLOCK, *shape[dim + 1 :])
    amax = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32) & _EXPONENT_BITS
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    usable = (power > 0) & jnp.isfinite(power)
    scale = jnp.where(usable, power, 1) * 2.0**-_LARGEST_EXPONENT
    codes = jnp.clip(blocks / scale, -VALUES.top, VALUES.top).astype(VALUES.dtype)
    return (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)).reshape(shape)
