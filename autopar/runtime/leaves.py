"""Checks of the arrays of a call, and their end, the same for every runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.frontend.signature import leaf_entry


def fits(leaves: Sequence[Any], entries: Sequence[Any]) -> bool:
    """Whether ``leaves`` have the shapes and dtypes of ``entries``."""
    return not any(
        isinstance(leaf, jax.core.Tracer) or leaf_entry(leaf, False) != entry
        for leaf, entry in zip(leaves, entries, strict=True)
    )


def check_data(leaf: Any, name: str) -> None:
    """Raises AutoparError where a leaf has no data, or gave it up to an earlier call.

    Args:
        leaf: the leaf.
        name: its path, for the message.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise AutoparError(
            f"{name} is a ShapeDtypeStruct, which has no data to run on",
            remedy="pass arrays; .plan() and .compile() take shapes",
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise AutoparError(
            f"{name} was donated to an earlier call; its buffer is gone",
            cause="donate_argnums lets a step reuse the memory of its argument",
            remedy="use the state that the step returned, or leave donate_argnums empty",
        )


def check_donated(leaves: Sequence[Any], names: Sequence[str], donated: Iterable[int]) -> None:
    """Raises AutoparError where a leaf that is to be given up was given up since it was placed, by another thread.

    Args:
        leaves: arguments of a call.
        names: their paths.
        donated: indices of those that are given up.
    """
    for i in donated:
        check_data(leaves[i], names[i])


def give_up(leaves: Sequence[Any], donated: Iterable[int]) -> None:
    """Deletes the arrays among ``leaves`` whose indices are ``donated``."""
    for i in donated:
        leaf = leaves[i]
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()
