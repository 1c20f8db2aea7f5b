"""Arguments of a plan in the order in which people look for them, those of repeated layers in one row.

The batch comes first, then each parameter with the optimizer state that follows it, then the rest. Paths that differ in
numbers alone (``state['blocks'][3]['w']``, ``block_3``) of one layout are a row: ``state['blocks'][*]['w'] x 24``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plan.types import InputRecord

_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=['_\].])|(?<=_)\d+$")
_TOKEN = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


@dataclass(frozen=True)
class InputGroup:
    """Arguments with one layout and one path but for numbers in it.

    Args:
        name: the path, with ``*`` for numbers that differ.
        members: the arguments.
    """

    name: str
    members: tuple[InputRecord, ...]

    @property
    def first(self) -> InputRecord:
        """First member of the group."""
        return self.members[0]

    @property
    def title(self) -> str:
        """The name, with how many there are."""
        return self.name + (f" x {len(self.members)}" if len(self.members) > 1 else "")

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of the members."""
        return tuple(sorted({i.stage for i in self.members}))


def input_groups(inputs: Sequence[InputRecord]) -> list[InputGroup]:
    """``inputs`` in groups: batch, parameters each with its optimizer state, what is left.

    Args:
        inputs: argument leaves of a plan.
    """
    by_path: dict[tuple[str, ...], list[InputRecord]] = {}
    for i in inputs:
        by_path.setdefault((_NUMBER.sub("*", i.path), i.role, i.type, i.layout, i.memory), []).append(i)
    groups = [InputGroup(_name([i.path for i in members]), tuple(members)) for members in by_path.values()]
    parameters = [g for g in groups if g.first.role == "parameter"]
    followers: dict[str, list[InputGroup]] = {}
    left = []
    for g in groups:
        if g.first.role == "optimizer":
            best = max(parameters, key=lambda p: _common(p.name, g.name), default=None)
            if best is not None and _common(best.name, g.name) and best.first.type == g.first.type:
                followers.setdefault(best.name, []).append(g)
            else:
                left.append(g)
    ordered = [g for g in groups if g.first.role == "batch"]
    for p in parameters:
        ordered += [p, *followers.pop(p.name, [])]
    ordered += left
    return [*ordered, *(g for g in groups if g.first.role not in ("batch", "parameter", "optimizer"))]


def _name(paths: Sequence[str]) -> str:
    """The one path of several, with ``*`` for each number that is not the same in all."""
    numbers = [_NUMBER.findall(p) for p in paths]
    shown = iter(n[0] if len(set(n)) == 1 else "*" for n in zip(*numbers, strict=True))
    return _NUMBER.sub(lambda _: next(shown), paths[0])


def _common(parameter: str, state: str) -> int:
    """Number of steps of a path, from its end, that two names have in common."""
    pairs = zip(reversed(_TOKEN.findall(parameter)), reversed(_TOKEN.findall(state)), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count
