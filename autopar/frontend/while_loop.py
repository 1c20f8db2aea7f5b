"""A while loop whose condition may have dims, as it has under ``jax.vmap``; `jax.lax.while_loop` takes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def while_loop(
    goes_on: Callable[[Sequence[Any]], Any],
    body: Callable[[Sequence[Any]], Sequence[Any]],
    carry: Sequence[Any],
    rank: int,
) -> list[Any]:
    """Last carry of a loop, or of a batch of loops that runs until the last of them is done.

    Args:
        goes_on: the condition, of the carry.
        body: an iteration, from the carry to the next one.
        carry: the first one.
        rank: number of dims of the condition; they are the first dims of each value of the carry.
    """

    def any_goes_on(carry: Any) -> Any:
        return jnp.any(goes_on(carry)) if rank else goes_on(carry)

    def iteration(carry: Any) -> list[Any]:
        new = list(body(carry))
        if not rank:
            return new
        undecided = goes_on(carry)  # loops that are done keep what they have
        return [
            jnp.where(lax.broadcast_in_dim(undecided, a.shape, range(rank)), a, b)
            for a, b in zip(new, carry, strict=True)
        ]

    return list(lax.while_loop(any_goes_on, iteration, list(carry)))
