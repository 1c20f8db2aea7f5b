"""Checks of the arrays of a call, and their end, the same for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.errors.base import as_kind
from autopar.frontend.signature import leaf_entry

_aval, _sharding, _is_deleted = attrgetter("aval"), attrgetter("sharding"), methodcaller("is_deleted")


@dataclass(frozen=True)
class _Together:
    """Common facts of leaves in the wanted place, for comparison with those of the next call.

    Args:
        indices: of these leaves.
        others: indices of the rest.
        kinds: their types.
        avals: their abstract values.
        shardings: where they lie.
    """

    indices: tuple[int, ...]
    others: tuple[int, ...]
    kinds: list[Any]
    avals: list[Any]
    shardings: list[Any]

    def lie(self, leaves: Sequence[Any]) -> bool:
        """Whether they lie as they did. Whether they have data is seen when they are used."""
        if self.others:
            leaves = [leaves[i] for i in self.indices]
        return (
            list(map(type, leaves)) == self.kinds
            and list(map(_aval, leaves)) == self.avals
            and list(map(_sharding, leaves)) == self.shardings
        )


class PlacedLeaves:
    """Leaves of the last calls that lay as wanted: those of the next call are compared with them all at once.

    Arrays of one program share their types, abstract values and shardings, so that lists of these are compared by
    identity, in C. A loop over leaves in Python would take as long as a small program.

    Args:
        count: of leaves.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[int, tuple[Any, Any, Any]] = {}
        self._together: _Together | None = None

    def note(self, index: int, leaf: Any) -> None:
        """Remembers that the leaf ``index`` of a call has the sharding that the compiled step wants."""
        if hasattr(leaf, "aval"):
            self._known[index] = type(leaf), leaf.aval, leaf.sharding
            self._together = None

    def others(self, leaves: Sequence[Any]) -> Sequence[int]:
        """Indices of the leaves that have to be looked at: those that do not lie as they did."""
        together = self._together or self._collected()
        if together.lie(leaves):
            return together.others
        return [i for i, leaf in enumerate(leaves) if not self._lies(i, leaf)]

    def _lies(self, index: int, leaf: Any) -> bool:
        kind, aval, sharding = self._known.get(index, (None, None, None))
        return type(leaf) is kind and leaf.aval is aval and leaf.sharding is sharding

    def _collected(self) -> _Together:
        known = dict(sorted(self._known.items()))
        columns = [list(column) for column in zip(*known.values(), strict=True)] or [[], [], []]
        others = tuple(i for i in range(self._count) if i not in known)
        self._together = _Together(tuple(known), others, *columns)
        return self._together


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
        error = AutoparError(
            f"{name} was donated to an earlier call; its buffer is gone",
            cause="donate_argnums lets a step reuse the memory of its argument",
            remedy="use the state that the step returned, or leave donate_argnums empty",
        )
        raise as_kind(error, RuntimeError)


def check_donated(leaves: Sequence[Any], names: Sequence[str], donated: Iterable[int]) -> None:
    """Raises AutoparError where a leaf that is to be given up was given up since it was placed, by another thread.

    Args:
        leaves: arguments of a call.
        names: their paths.
        donated: indices of those that are given up.
    """
    donated = tuple(donated)
    if not _are_deleted(leaves, donated, any):
        return
    for i in donated:
        check_data(leaves[i], names[i])


def give_up(leaves: Sequence[Any], donated: Iterable[int]) -> None:
    """Deletes the arrays among ``leaves`` whose indices are ``donated``."""
    donated = tuple(donated)
    if _are_deleted(leaves, donated, all):
        return
    for i in donated:
        leaf = leaves[i]
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def _are_deleted(leaves: Sequence[Any], indices: Sequence[int], which: Callable[[Iterable[bool]], bool]) -> bool:
    """``which`` (`any` or `all`) of whether leaves are deleted. With one that is no array any is True, all False."""
    try:
        return which(map(_is_deleted, [leaves[i] for i in indices]))
    except AttributeError:
        return which is any
