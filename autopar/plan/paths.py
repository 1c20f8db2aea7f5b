"""Paths of arguments as users write them: names of arguments, keys and attributes with ``/`` between them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def parts(path: str) -> list[str]:
    """Parts of a path: ``state.params['w'][0]`` is state, params, w, 0; so is ``state/params/w/0``."""
    for mark in "[]'\".":
        path = path.replace(mark, "/")
    return [p for p in path.split("/") if p]


def matches(pattern: str, path: str) -> bool:
    """Whether ``pattern``, where ``*`` is any part and ``**`` any number of parts, is the path of an input."""
    return _match(parts(pattern), parts(path))


def _match(wanted: Sequence[str], given: Sequence[str]) -> bool:
    if not wanted:
        return not given
    if wanted[0] == "**":
        return any(_match(wanted[1:], given[n:]) for n in range(len(given) + 1))
    return bool(given) and fnmatchcase(given[0], wanted[0]) and _match(wanted[1:], given[1:])
