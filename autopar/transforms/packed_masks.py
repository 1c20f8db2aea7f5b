"""`packed_masks`: what is true or false waits for the backward pass as bits (Gist's Binarize, Jain et al., ISCA'18).

ReLU, dropout and selections leave a mask for the backward pass, a byte an element. Between its last reader in the
forward pass and its first one in the backward pass it is here an array of an eighth of the bytes: bit i of byte j is
element 8 j + i of the dim. No value changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.transforms.split import split

_BITS = 8
# Masks of fewer elements are left as they are.
_LEAST_SIZE = 1024


def packed_masks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with masks of its forward pass held as bits; results are those of ``step``, to the bit.

    Masks inside loops, those that loops read, and those of which no dim is a multiple of 8 stay bytes.

    Args:
        step: a plain train step, ``step(*args)``.

    Raises:
        TraceError: when called: the step differentiates nothing, or has two updates.
    """

    @wraps(step)
    def packed(*args: Any, **kwargs: Any) -> Any:
        return split(partial(step, **kwargs), args).holding(jax.tree.leaves(args), _bits_of)

    packed.__name__ = f"packed_{getattr(step, '__name__', 'step')}"
    return packed


def _bits_of(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """A mask as bytes of eight elements, and what makes it a mask again; None for other values."""
    dims = [d for d, n in enumerate(jnp.shape(value)) if n % _BITS == 0]
    if jnp.result_type(value) != jnp.bool_ or jnp.size(value) < _LEAST_SIZE or not dims:
        return None
    dim, shape = dims[-1], value.shape
    eights = (*shape[:dim], shape[dim] // _BITS, _BITS, *shape[dim + 1 :])
    numbers = lax.broadcasted_iota(jnp.uint8, eights, dim + 1)
    codes = lax.shift_left(lax.reshape(value, eights).astype(jnp.uint8), numbers)
    code = jnp.sum(codes, axis=dim + 1, dtype=jnp.uint8)

    def mask(code: Any) -> Any:
        again = lax.broadcasted_iota(jnp.uint8, eights, dim + 1)
        bytes = lax.broadcast_in_dim(code, eights, [d for d in range(len(eights)) if d != dim + 1])
        return lax.reshape(lax.shift_right_logical(bytes, again) & jnp.uint8(1), shape) != 0

    return code, mask
