"""Parts of a graph that share nothing that is computed from given values: parameters that an optimizer treats alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.ir.graph import Operator


def separate_parts(operators: Sequence[Operator], sources: Collection[str]) -> tuple[tuple[Operator, ...], ...]:
    """Operators by the part that they belong to; those of a part in running order, parts by their first operator.

    Two operators are of one part where one reads what the other makes of the sources, or both read the same source.
    What reads neither a source nor what is computed from one is of no part.

    Args:
        operators: in running order.
        sources: names of values.
    """
    part_of: dict[str, int] = {}
    joined: list[int] = []

    def root(part: int) -> int:
        while joined[part] != part:
            part = joined[part]
        return part

    reached = set(sources)
    members = []
    for op in operators:
        read = [o for o in op.reads if o in reached]
        if not read:
            continue
        part = len(joined)
        joined.append(part)
        for name in read:
            if name in part_of:
                other = root(part_of[name])
                joined[max(other, part)] = min(other, part)
                part = min(other, part)
            part_of[name] = part
        for v in op.results:
            reached.add(v.name)
            part_of[v.name] = part
        members.append((op, part))
    parts: dict[int, list[Operator]] = {}
    for op, part in members:
        parts.setdefault(root(part), []).append(op)
    return tuple(map(tuple, parts.values()))
