"""A plan's predictions joined with what was read of the compiled program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost import wire_bytes
from autopar.lower.aot.base import Target
from autopar.lower.aot.groups import GroupNames
from autopar.lower.aot.messages import CompiledCollective, CompiledProgram
from autopar.lower.aot.verification import BYTES_TOLERANCE, CollectiveRow, Verification
from autopar.plan import Communication, Plan

_OPERATORS = 4
_Place = tuple[str, str]


@dataclass
class _Predicted:
    count: float = 0.0
    wire_bytes: float = 0.0
    operators: dict[str, None] = field(default_factory=dict)


def compare(plan: Plan, target: Target, compiled: CompiledProgram, hlo: str = "") -> Verification:
    """What `Verification` shows.

    Args:
        plan: a plan of one stage.
        target: what was compiled for.
        compiled: what was read of the result.
        hlo: its text.
    """
    (stage,) = plan.stages
    rows = join(stage.collectives, compiled.collectives, stage.mesh_axes)
    return Verification(
        plan.content.program,
        plan.content.cluster_name,
        target.text,
        compiled.device_kind,
        stage.mesh_axes,
        rows,
        stage.memory,
        compiled.memory,
        plan.step_time,
        compiled.fusions,
        compiled.cycles,
        compiled.compile_s,
        hlo,
    )


def join(
    predicted: Sequence[Communication], compiled: Sequence[CompiledCollective], axes: Sequence[tuple[str, int]]
) -> tuple[CollectiveRow, ...]:
    """Rows of collectives, those that differ first, then by kind, axis and falling bytes.

    What is compiled counts for a prediction of the same kind and axes whose bytes are the same, or near enough.
    """
    said = _by_place(predicted, axes)
    found: dict[_Place, dict[int, CompiledCollective]] = defaultdict(dict)
    for c in compiled:
        sizes = said.get((c.kind, c.axis), {})
        size = min((s for s in sizes if _near(s, c.bytes)), key=lambda s: (abs(s - c.bytes), s), default=c.bytes)
        before = found[c.kind, c.axis].get(size)
        found[c.kind, c.axis][size] = c if before is None else _together(before, c)
    rows = []
    for place in sorted({*said, *found}):
        for size in sorted({*said.get(place, {}), *found.get(place, {})}, reverse=True):
            p = said.get(place, {}).get(size, _Predicted())
            c_ = found.get(place, {}).get(size)
            rows.append(
                CollectiveRow(
                    *place,
                    size,
                    p.count,
                    c_.count if c_ else 0.0,
                    p.wire_bytes,
                    c_.wire_bytes if c_ else 0.0,
                    c_.instructions if c_ else 0,
                    tuple(p.operators)[:_OPERATORS],
                    c_.scopes if c_ else (),
                    c_.exact if c_ else True,
                )
            )
    return tuple(sorted(rows, key=lambda r: (r.ok, r.kind, r.axis, -r.bytes)))


def _by_place(
    predicted: Sequence[Communication], axes: Sequence[tuple[str, int]]
) -> dict[_Place, dict[int, _Predicted]]:
    names, sizes = GroupNames(axes), dict(axes)
    said: dict[_Place, dict[int, _Predicted]] = defaultdict(dict)
    for r in predicted:
        along = r.axis.split("+")
        n = math.prod(sizes[a] for a in along)
        if n > 1:
            entry = said[r.kind, names.ordered(along)].setdefault(r.bytes, _Predicted())
            entry.count += r.count
            entry.wire_bytes += r.count * wire_bytes(r.kind, r.bytes, n)
            entry.operators.update(dict.fromkeys(r.operators))
    return said


def _near(a: int, b: int) -> bool:
    return abs(a - b) <= BYTES_TOLERANCE * a


def _together(a: CompiledCollective, b: CompiledCollective) -> CompiledCollective:
    return CompiledCollective(
        a.kind,
        a.axis,
        a.bytes,
        a.wire_bytes + b.wire_bytes,
        a.count + b.count,
        a.instructions + b.instructions,
        a.exact and b.exact,
        tuple(sorted({*a.dtypes, *b.dtypes})),
        tuple(sorted({*a.scopes, *b.scopes})),
    )
