"""A plan's predictions joined with what was read of the compiled program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost import wire_bytes
from autopar.ir import Graph
from autopar.lower.aot.base import Target
from autopar.lower.aot.estimates import estimated
from autopar.lower.aot.groups import GroupNames
from autopar.lower.aot.messages import CompiledCollective
from autopar.lower.aot.planned import planned_seconds, rates_of
from autopar.lower.aot.rewrites import Key, paired, sent
from autopar.lower.aot.rows import BYTES_TOLERANCE, CollectiveRow
from autopar.lower.aot.spawn import Compilation
from autopar.lower.aot.verification import Verification
from autopar.plan import Communication, Plan

_OPERATORS = 4
_Place = tuple[str, str]


@dataclass
class _Predicted:
    count: float = 0.0
    wire_bytes: float = 0.0
    operators: dict[str, None] = field(default_factory=dict)


def compare(plan: Plan, graph: Graph, target: Target, done: Compilation) -> Verification:
    """The contents of a `Verification`.

    Args:
        plan: a plan of one stage.
        graph: of the function that it was made for.
        target: what was compiled for.
        done: what became of it.
    """
    (stage,) = plan.stages
    compiled = done.compiled
    return Verification(
        plan.content.program,
        plan.content.cluster_name,
        target.text,
        compiled.device_kind,
        stage.mesh_axes,
        join(stage.collectives, compiled.collectives, stage.mesh_axes, done.lowered, done.equal),
        stage.memory,
        compiled.memory,
        sum(c.wire_bytes for c in compiled.collectives),
        plan.step_time,
        planned_seconds(plan, graph),
        estimated(done.hlo, rates_of(target, plan)),
        compiled.fusions,
        compiled.cycles,
        compiled.compile_s,
        done.hlo,
    )


def join(
    predicted: Sequence[Communication],
    compiled: Sequence[CompiledCollective],
    axes: Sequence[tuple[str, int]],
    lowered: Mapping[Key, float] | None = None,
    equal: Mapping[Key, float] | None = None,
) -> tuple[CollectiveRow, ...]:
    """Rows of collectives, those that differ first, then by kind, axis and falling bytes.

    What is compiled counts for a prediction of the same kind and axes whose bytes are the same, or near enough; what
    is left over on both sides is paired by `autopar.lower.aot.rewrites`.

    Args:
        predicted: the plan's records.
        compiled: what was read of the compiled program.
        axes: (axis, size) of the mesh.
        lowered: what the lowered program runs; None takes it to be what was predicted.
        equal: of that, what a compiler can do without.
    """
    said, sizes = _by_place(predicted, axes), dict(axes)
    compiled_by_place: dict[_Place, dict[int, CompiledCollective]] = defaultdict(dict)
    for c in compiled:
        known = said.get((c.kind, c.axis), {})
        size = min((s for s in known if _near(s, c.bytes)), key=lambda s: (abs(s - c.bytes), s), default=c.bytes)
        before = compiled_by_place[c.kind, c.axis].get(size)
        compiled_by_place[c.kind, c.axis][size] = c if before is None else _together(before, c)
    pairs = _counts(said, compiled_by_place, lowered)
    pairing = paired({k: p for k, (p, _) in pairs.items()}, {k: c for k, (_, c) in pairs.items()}, sizes, equal)
    rows = []
    for key, (count, _) in pairs.items():
        kind, axis, size = key
        p = said.get((kind, axis), {}).get(size, _Predicted())
        c_ = compiled_by_place.get((kind, axis), {}).get(size)
        mine = [r for r in pairing.rewritten if r.key == key]
        kept = pairing.kept.get(key, 0.0) + pairing.surplus.get(key, 0.0)
        given = count if lowered is None else lowered.get(key, 0.0)
        if kept or count or given:
            each = c_.wire_bytes / c_.count if c_ else 0.0
            rows.append(
                CollectiveRow(
                    kind,
                    axis,
                    size,
                    count,
                    given,
                    kept + sum(r.count for r in mine),
                    p.wire_bytes,
                    kept * each + sum(r.count * sent(kind, r.bytes, axis, sizes) for r in mine),
                    c_.instructions if c_ and not mine else 0,
                    tuple(f"{r.count:g} {r.note}" for r in mine),
                    tuple(p.operators)[:_OPERATORS],
                    c_.scopes if c_ else (),
                    c_.exact if c_ else True,
                )
            )
    return tuple(sorted(rows, key=lambda r: (r.ok, r.kind, r.axis, -r.bytes)))


def _counts(
    said: Mapping[_Place, Mapping[int, _Predicted]],
    compiled_by_place: Mapping[_Place, Mapping[int, CompiledCollective]],
    lowered: Mapping[Key, float] | None,
) -> dict[Key, tuple[float, float]]:
    """Numbers of predicted and compiled collectives, by key; those that were lowered alone count nothing."""
    pairs = {(*place, size): (p.count, 0.0) for place, by_size in said.items() for size, p in by_size.items()}
    for place, by_bytes in compiled_by_place.items():
        for size, c in by_bytes.items():
            pairs[(*place, size)] = (pairs.get((*place, size), (0.0, 0.0))[0], c.count)
    return {**dict.fromkeys(lowered or (), (0.0, 0.0)), **pairs}


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
