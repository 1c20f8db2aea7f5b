"""Arguments of a plan: their paths, the rows in which people read them, and logical axis rules.

`path_matches` compares a pattern of a user with a path: names of arguments, keys and attributes with ``/`` between
them.

`input_groups` orders arguments as people look for them, those of repeated layers in one row. The batch comes first,
then each parameter with the optimizer state that follows it, then the rest. Paths that differ in numbers alone
(``state['blocks'][3]['w']``, ``block_3``) of one layout are a row: ``state['blocks'][*]['w'] x 24``.

`axis_rules` says a plan as `flax.linen.logical_axis_rules` and MaxText's ``logical_axis_rules`` do, from names of dims
to mesh axes. A plan decides for each tensor by itself, so that it can be said in such rules only where dims of one
name are split in the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.errors import PlanMismatchError
from autopar.ir import Layout
from autopar.plan.content import PlanContent
from autopar.plan.trail import ranges_of, ranges_text
from autopar.plan.types import InputRecord, dtype_and_shape

_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?=['_\].])|(?<=_)\d+$")
_TOKEN = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
Rule = tuple[str, str | tuple[str, ...] | None]


def path_parts(path: str) -> list[str]:
    """Parts of a path: ``state.params['w'][0]`` is state, params, w, 0; so is ``state/params/w/0``."""
    for mark in "[]'\".":
        path = path.replace(mark, "/")
    return [p for p in path.split("/") if p]


def path_matches(pattern: str, path: str) -> bool:
    """Whether ``pattern``, where ``*`` is any part and ``**`` any number of parts, is the path of an input."""
    return _match(path_parts(pattern), path_parts(path))


def _match(wanted: Sequence[str], given: Sequence[str]) -> bool:
    if not wanted:
        return not given
    if wanted[0] == "**":
        return any(_match(wanted[1:], given[n:]) for n in range(len(given) + 1))
    return bool(given) and fnmatchcase(given[0], wanted[0]) and _match(wanted[1:], given[1:])


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
    def held_by(self) -> str:
        """The stages that hold the members, and how much each holds.

        ``3`` is one stage, ``0, 3 (all on each)`` are two that hold everything, and ``0-3 (6 of 24 each)`` or
        ``0 (8 of 24), 1 (16 of 24)`` are stages that hold layers: slices of a stack, or members.
        """
        counts, total = Counter[int](), 0
        for member in self.members:
            records = member.of_stages
            is_stack = any(p.slices for p in member.parts)
            for r in records:
                counts[r.stage] += dtype_and_shape(r.type)[1][0] if is_stack else 1
            total += dtype_and_shape(member.type)[1][0] if is_stack else 1
        if len(counts) == 1:
            return str(*counts)
        by_count: dict[int, list[int]] = {}
        for stage, count in sorted(counts.items()):
            by_count.setdefault(count, []).append(stage)
        return ", ".join(_held_text(stages, count, total) for count, stages in by_count.items())


def input_groups(inputs: Sequence[InputRecord]) -> list[InputGroup]:
    """``inputs`` in groups: batch, parameters each with its optimizer state, what is left.

    Args:
        inputs: argument leaves of a plan.
    """
    by_path: dict[tuple[object, ...], list[InputRecord]] = {}
    for i in inputs:
        layouts = i.layout if len({(p.layout, p.memory) for p in i.parts}) < 2 else i.parts
        by_path.setdefault((_NUMBER.sub("*", i.path), i.role, i.type, layouts, i.memory), []).append(i)
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


def _held_text(stages: Sequence[int], count: int, total: int) -> str:
    numbers = ranges_text(ranges_of(stages))
    if count == total:
        return f"{numbers} (all on each)" if len(stages) > 1 else f"{numbers} (all)"
    return f"{numbers} ({count} of {total}{' each' * (len(stages) > 1)})"


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


def axis_rules(c: PlanContent, names: Mapping[str, Sequence[str | None]] | None, stage: int = 0) -> list[Rule]:
    """Rules for the arguments of one stage.

    Args:
        c: the plan.
        names: for paths of arguments, or ends of paths, the logical name of each dim (None: a dim without a name, which
            must be whole); None names each dim by its path and number, as ``params['w']:0``.
        stage: its number.

    Raises:
        PlanMismatchError: a path is not in the plan or has another number of dims; dims of one name are split over
            different axes; or a dim without a name is split.
    """
    rules: dict[str, tuple[tuple[str, ...], str]] = {}
    for path, dims, labels in _named(c, names, stage):
        if len(labels) != len(dims):
            raise PlanMismatchError(f"{path} has {len(dims)} dims; {len(labels)} names are given: {tuple(labels)}")
        for d, (axes, label) in enumerate(zip(dims, labels, strict=True)):
            if label is None:
                if axes:
                    raise PlanMismatchError(
                        f"dim {d} of {path} is split over {'+'.join(axes)} and has no logical name",
                        remedy="a name for it, or a constraint that keeps it whole",
                    )
                continue
            known, first = rules.setdefault(label, (axes, path))
            if known != axes:
                raise PlanMismatchError(
                    f"dims called {label!r} have two splits: over {'+'.join(known) or 'nothing'} in {first}, over "
                    f"{'+'.join(axes) or 'nothing'} in {path}",
                    cause="a plan decides for each tensor; rules decide for each name",
                    remedy="different names for the two, or constraints= that make them the same",
                )
    return [(label, _said(axes)) for label, (axes, _) in rules.items()]


def _named(
    c: PlanContent, names: Mapping[str, Sequence[str | None]] | None, stage: int
) -> list[tuple[str, tuple[tuple[str, ...], ...], Sequence[str | None]]]:
    inputs = [r for i in c.inputs for r in i.of_stages if r.stage == stage]
    if names is None:
        groups = input_groups(inputs)
        dims = [Layout.parse(g.first.layout).dims for g in groups]
        return [(g.name, k, [f"{g.name}:{d}" for d in range(len(k))]) for g, k in zip(groups, dims, strict=True)]
    named = []
    for end, labels in names.items():
        matching = [i for i in inputs if i.path.endswith(end)]
        if not matching:
            raise PlanMismatchError(
                f"the plan has no argument {end!r}", remedy="one of: " + ", ".join(i.path for i in inputs[:5])
            )
        named += [(i.path, Layout.parse(i.layout).dims, labels) for i in matching]
    return named


def _said(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes
