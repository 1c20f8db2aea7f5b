"""Names that an error offers in place of one that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Names up to which all are listed.
_MOST_LISTED = 20
_MOST_NEAR = 5


def known_names(wanted: str, known: Iterable[str]) -> str:
    """``did you mean 'alpa'? known: alpa, beam``; of many names the nearest, and how many there are.

    Args:
        wanted: the unknown name.
        known: names that may be given, in the order in which they are listed.
    """
    names = list(known)
    near = _nearest(wanted, names, 1, 0.4)
    meant = f"did you mean {near[0]!r}? " if near else ""
    if len(names) <= _MOST_LISTED:
        return f"{meant}known: {', '.join(names)}" if names else "none is known"
    return near_names(wanted, names)


def near_names(wanted: str, known: Iterable[str]) -> str:
    """``near names: up, down (2 of 14)``: the nearest of names that are too many to list; "" where there are none."""
    names = list(known)
    near = _nearest(wanted, names, _MOST_NEAR, 0.3) or names[:_MOST_NEAR]
    cut = f" ({len(near)} of {len(names)})" if len(near) < len(names) else ""
    return f"near names: {', '.join(near)}{cut}" if names else ""


def _nearest(wanted: str, names: Iterable[str], most: int, least_ratio: float) -> list[str]:
    """The names that are most similar, whatever their case, the nearest first.

    Args:
        wanted: the unknown name.
        names: those that may be given.
        most: how many to give at most.
        least_ratio: the least similarity, 0 to 1.
    """
    by_folded: dict[str, list[str]] = {}
    for name in names:
        by_folded.setdefault(name.casefold(), []).append(name)
    near = difflib.get_close_matches(wanted.casefold(), by_folded, most, least_ratio)
    return [name for folded in near for name in by_folded[folded]][:most]


def counted(count: int, noun: str) -> str:
    """``count`` with ``noun``, in the plural where it is not 1."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
