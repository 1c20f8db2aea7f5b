"""Codes in which values of the forward pass wait for the backward pass (Gist, Jain et al., ISCA'18).

Masks are bits, and which element of a window is the largest is a number of few bits: both exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

#: A code, and what makes the value of it again.
Code: TypeAlias = tuple[Any, Callable[[Any], Any]]

#: Values of fewer elements stay as they are.
LEAST_SIZE = 1024
_BYTE = 8


def mask_bits(value: Any) -> Code | None:
    """A mask with eight elements in a byte; None for other values, small ones, and where no dim is a multiple of 8."""
    if jnp.result_type(value) != jnp.bool_ or jnp.size(value) < LEAST_SIZE:
        return None
    if (code := packed(value.astype(jnp.uint8), 1)) is None:
        return None
    bits, unpacked = code
    return bits, lambda bits: unpacked(bits) != 0


def packed(numbers: Any, bits: int) -> Code | None:
    """Numbers below ``2**bits`` side by side in bytes; None where no dim is a multiple of the numbers in a byte.

    Args:
        numbers: of dtype uint8.
        bits: 1, 2 or 4. Number i of byte j is element ``8 / bits * j + i`` of the dim.
    """
    each = _BYTE // bits
    dims = [d for d, n in enumerate(numbers.shape) if n % each == 0]
    if not dims:
        return None
    dim, shape = dims[-1], numbers.shape
    groups = (*shape[:dim], shape[dim] // each, each, *shape[dim + 1 :])

    def shifts() -> Any:
        return lax.broadcasted_iota(jnp.uint8, groups, dim + 1) * jnp.uint8(bits)

    shifted = lax.shift_left(lax.reshape(numbers, groups), shifts())

    def unpacked(bytes: Any) -> Any:
        repeated = lax.broadcast_in_dim(bytes, groups, [d for d in range(len(groups)) if d != dim + 1])
        return lax.reshape(lax.shift_right_logical(repeated, shifts()) & jnp.uint8(2**bits - 1), shape)

    return jnp.sum(shifted, axis=dim + 1, dtype=jnp.uint8), unpacked


@dataclass(frozen=True)
class MaxWindows:
    """Windows of a maximum, and its gradient by the number of the element in its window that was the largest.

    Args:
        shape: of what windows are taken of.
        sizes, strides: of windows, by dim.
        padding: elements that windows reach over either end, by dim.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows, by dim."""
        dims = zip(self.shape, self.sizes, self.strides, self.padding, strict=True)
        return tuple((n + low + high - size) // stride + 1 for n, size, stride, (low, high) in dims)

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Places in a window, in the order in which their elements are compared."""
        return list(itertools.product(*map(range, self.sizes)))

    def largest(self, value: Any) -> Code | None:
        """Number of the first largest element of each window, in 1, 2 or 4 bits; None for wide windows."""
        bits = next((b for b in (1, 2, 4) if len(self.offsets) <= 2**b), None)
        if bits is None or jnp.size(value) < LEAST_SIZE:
            return None
        lowest = jnp.array(-jnp.inf if jnp.issubdtype(value.dtype, jnp.floating) else 0, value.dtype)
        wide = lax.pad(value, lowest, [(low, high, 0) for low, high in self.padding])
        best: Any = None
        number: Any = None
        seen: Any = None
        for n, offset in enumerate(self.offsets):
            piece, inside = self._piece(wide, offset), self._inside(offset)
            if best is None:
                best, number, seen = piece, jnp.zeros(self.counts, jnp.uint8), inside
                continue
            taken = lax.bitwise_not(lax.ge(best, piece))
            if not (inside.all() and seen.all()):
                taken = (taken | ~seen) & inside
            best, number = lax.select(taken, piece, best), jnp.where(taken, jnp.uint8(n), number)
            seen = seen | inside
        return packed(number, bits) or (number, lambda number: number)

    def gradient(self, number: Any, cotangent: Any) -> Any:
        """The cotangent of what windows are taken of: each window's goes to its largest element."""
        total: Any = None
        zero = jnp.zeros((), cotangent.dtype)
        for n, offset in reversed(list(enumerate(self.offsets))):  # sums in the order of the windows
            part = jnp.where(number == jnp.uint8(n), cotangent, zero)
            dims = zip(offset, self.padding, self.shape, self.counts, self.strides, strict=True)
            places = [(k - low, n - (k - low) - (c - 1) * stride - 1, stride - 1) for k, (low, _), n, c, stride in dims]
            spread = lax.pad(part, zero, places)
            total = spread if total is None else total + spread
        return total

    def _piece(self, wide: Any, offset: Sequence[int]) -> Any:
        stops = [k + (c - 1) * s + 1 for k, c, s in zip(offset, self.counts, self.strides, strict=True)]
        return lax.slice(wide, offset, stops, self.strides)

    def _inside(self, offset: Sequence[int]) -> Any:
        """Whether the element at ``offset`` of each window is one of the value's."""
        inside = np.ones((1,) * len(self.shape), bool)
        dims = zip(offset, self.counts, self.strides, self.padding, self.shape, strict=True)
        for d, (k, count, stride, (low, _), n) in enumerate(dims):
            at = np.arange(count) * stride + k - low
            shape = [count if i == d else 1 for i in range(len(self.shape))]
            inside = inside & ((at >= 0) & (at < n)).reshape(shape)
        return inside
