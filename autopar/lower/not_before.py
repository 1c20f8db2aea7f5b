"""`behind` and `not_before`: what a compiler must not compute early, nor take from an earlier time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import whole_bytes

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def behind(piece: Any, others: Sequence[Any]) -> Any:
    """``piece`` as it is, in a form that a compiler cannot compute before all of ``others`` are there.

    More bits set than there are is never true, which no pass over HLO knows.

    Args:
        piece: an array.
        others: numbers, from `element_of`.
    """
    never = jnp.zeros((), bool)
    for other in others:
        bits = lax.bitcast_convert_type(other, _BITS[other.dtype.itemsize])
        never |= lax.population_count(bits) > 8 * other.dtype.itemsize
    return jnp.where(never, jnp.zeros_like(piece), piece)


def element_of(array: Any) -> Any:
    """One number of an array, in a type of whole bytes; None where it has none."""
    array = jnp.asarray(array)
    if not array.size or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    element = lax.squeeze(lax.slice(array, (0,) * array.ndim, (1,) * array.ndim), range(array.ndim))
    element = element.real if jnp.issubdtype(element.dtype, jnp.complexfloating) else element
    element = element.astype(whole_bytes(element.dtype))
    return element if element.dtype.itemsize in _BITS else None


def not_before(piece: Any, now: Any) -> Any:
    """``piece``, in a form that a compiler cannot compute before ``now`` is there; floats alone wait.

    Forward and backward each gather a parameter for themselves where memory is short. A compiler would see two
    equal gathers, do one of them, early, and keep it. An ``optimization_barrier`` does not stop XLA's CPU compiler,
    which drops barriers first.
    """
    if now is None or not jnp.issubdtype(now.dtype, jnp.inexact) or not jnp.issubdtype(piece.dtype, jnp.floating):
        return piece
    element = element_of(now)
    return piece if element is None else behind(piece, [element])
