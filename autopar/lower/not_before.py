"""`not_before`: what a compiler must not compute early, nor take from an earlier time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def not_before(piece: Any, now: Any) -> Any:
    """``piece``, in a form that a compiler cannot compute before ``now`` is there.

    Forward and backward each gather a parameter for themselves where memory is short. A compiler would see two
    equal gathers, do one of them, early, and keep it. An ``optimization_barrier`` does not stop XLA's CPU compiler,
    which drops barriers first. So the piece is made to depend on an element of ``now``, in a way that changes no value:
    it would be zero only where the square of a whole number, the element's bits, leaves 2 when divided by 4. No square
    does, and no pass over HLO knows that.
    """
    if (
        now is None
        or not now.size
        or not any(jnp.issubdtype(now.dtype, f) for f in (jnp.floating, jnp.complexfloating))
    ):
        return piece
    if not jnp.issubdtype(piece.dtype, jnp.floating):
        return piece
    element = lax.squeeze(lax.slice(now, (0,) * now.ndim, (1,) * now.ndim), range(now.ndim))
    bits = lax.bitcast_convert_type(element.real.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits * bits % 4 == 2, jnp.zeros_like(piece), piece)
