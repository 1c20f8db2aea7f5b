"""`new_state_of`: the state in what a step returns."""

from __future__ import annotations

from typing import Any

import jax

from autopar.errors import AutoparError


def new_state_of(state: Any, result: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """The new state in a result, and what comes behind it; None where the state is all.

    Args:
        state: what the step took.
        result: what it returned.

    Raises:
        AutoparError: the result is neither a state like the one taken nor a tuple that begins with one.
    """
    like: Any = jax.tree.structure(state)
    if jax.tree.structure(result) == like:
        return result, None
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == like:
        return result[0], result[1:]
    raise AutoparError(
        "the step returns neither a state like the one that it takes nor a tuple that begins with one",
        remedy="return (state, metrics)",
    )
