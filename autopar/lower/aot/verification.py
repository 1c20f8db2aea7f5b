"""`Verification`: what a plan of one stage predicts next to what XLA's compiler made of it.

`compare` joins a plan's predictions with what was read of the compiled program. Plans of several stages, and those of
any number, are compared in `autopar.lower.aot.pipeline_verification`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autopar.cost import wire_bytes
from autopar.ir import Graph
from autopar.lower.aot.base import Target
from autopar.lower.aot.collectives import GroupNames, Key, paired, sent
from autopar.lower.aot.estimates import StepSeconds, estimated, planned_seconds, rates_of
from autopar.lower.aot.messages import CompiledCollective, CompiledMemory
from autopar.lower.aot.rows import BYTES_TOLERANCE, CollectiveRow, ComparedCollectives, Shown, ShownVerification, listed
from autopar.lower.aot.spawn import Compilation
from autopar.plan import Communication, Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.plan.types import Memory

#: Peak memory may differ by this share.
MEMORY_TOLERANCE = 0.10
#: Title of a group of seconds, and its field.
_GROUPS = (
    ("products", "products_s"),
    ("bound by memory", "memory_s"),
    ("collectives", "collectives_s"),
    ("of them exposed", "exposed_s"),
)
_OPERATORS = 4
_Place = tuple[str, str]


@dataclass(frozen=True)
class Verification(ComparedCollectives, ShownVerification):
    """Result of `autopar.verify`; prints as a table.

    Args:
        program: name of the function.
        cluster: name of the cluster that the plan was made for.
        target: what was compiled for.
        device_kind: the compiler's name of the devices.
        mesh_axes: (axis, size) of the plan's mesh.
        rows: collectives, those that differ first.
        predicted_memory: bytes a device by kind, as the plan says.
        compiled_memory: bytes a device, as the compiler's buffer assignment has them.
        sent_bytes: bytes that a device sends a step in the collectives of the compiled program as they are.
        predicted_step_s: seconds a step that the plan predicts.
        planned_step_s: the same by group of operators, see `StepSeconds`.
        compiled_step_s: seconds a step of the compiled program by group, as its compiler estimates them.
        fusions: fusions of the compiled program.
        cycles: cycles of a step as the compiler estimates them; None where it says none.
        compile_s: seconds that compiling took.
        hlo: the optimized HLO.
    """

    program: str
    cluster: str
    target: str
    device_kind: str
    mesh_axes: tuple[tuple[str, int], ...]
    rows: tuple[CollectiveRow, ...]
    predicted_memory: Memory
    compiled_memory: CompiledMemory
    sent_bytes: float
    predicted_step_s: float
    planned_step_s: StepSeconds
    compiled_step_s: StepSeconds
    fusions: int
    cycles: float | None
    compile_s: float = field(compare=False)
    hlo: str = field(default="", repr=False, compare=False)

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the compiled program needs."""
        return self.compiled_memory.total

    @property
    def corrected_step_s(self) -> float:
        """Seconds a step as the compiler has them, with what the plan says of moving state to the host and back."""
        return self.compiled_step_s.total_s + max(0.0, self.predicted_step_s - self.planned_step_s.total_s)

    @property
    def corrections(self) -> str:
        """Groups whose seconds differ by more than a tenth."""
        return corrections(self.planned_step_s, self.compiled_step_s)

    @property
    def memory_ratio(self) -> float:
        """Predicted over compiled peak memory."""
        return self.predicted_memory.total / max(1, self.compiled_memory.total)

    @property
    def memory_ok(self) -> bool:
        """Whether predicted peak memory is within 10% of the compiled program's."""
        return abs(self.memory_ratio - 1) <= MEMORY_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether collectives and memory are as predicted."""
        return self.collectives_ok and self.memory_ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the HLO."""
        p, c = self.predicted_memory, self.compiled_memory
        return {
            "program": self.program,
            "cluster": self.cluster,
            "target": self.target,
            "device_kind": self.device_kind,
            "mesh": dict(self.mesh_axes),
            "ok": self.ok,
            "memory_ok": self.memory_ok,
            **self.collectives_dict(),
            "predicted_memory": {k: getattr(p, k) for k in p.__struct_fields__} | {"total": p.total},
            "compiled_memory": {k: getattr(c, k) for k in c.__struct_fields__} | {"total": c.total},
            "predicted_sent_bytes": self.predicted_sent_bytes,
            "compiled_sent_bytes": self.sent_bytes,
            "predicted_step_s": self.predicted_step_s,
            "planned_step_s": msgspec.structs.asdict(self.planned_step_s),
            "compiled_step_s": msgspec.structs.asdict(self.compiled_step_s),
            "fusions": self.fusions,
            "cycles": self.cycles,
            "compile_s": self.compile_s,
        }

    def _head(self) -> tuple[tuple[str, str], ...]:
        mesh = " x ".join(f"{n}@{a}" for a, n in self.mesh_axes)
        cycles = "" if self.cycles is None else f", {self.cycles:.4g} estimated cycles"
        said, done = bytes_text(self.predicted_sent_bytes), bytes_text(self.sent_bytes)
        memory = "within" if self.memory_ok else "not within"
        return (
            ("program", f"{self.program}, planned for {self.cluster}, mesh {mesh}"),
            ("target", f"{self.target} ({self.device_kind}), compiled in {seconds_text(self.compile_s)}"),
            ("collectives", f"{self.collectives_verdict()}; a device sends {said} predicted, {done} compiled"),
            ("memory", f"{memory} {MEMORY_TOLERANCE:.0%}: predicted/compiled {self.memory_ratio:.3f}"),
            (
                "step time",
                f"{seconds_text(self.predicted_step_s)} predicted, {seconds_text(self.compiled_step_s.total_s)} "
                f"compiled{cycles}",
            ),
            ("fusions", str(self.fusions)),
        )

    def _tables(self) -> Sequence[Shown]:
        p, c = self.predicted_memory, self.compiled_memory
        parts = {"arguments": c.arguments, "outputs": c.outputs, "temporaries": c.temporaries, "alias": -c.alias}
        memory = [
            ("predicted", bytes_text(p.total), listed({k: getattr(p, k) for k in p.__struct_fields__})),
            ("compiled", bytes_text(c.total), listed(parts)),
        ]
        return (
            *self.collectives_tables(),
            ("memory a device", ("", "peak", "of which"), memory),
            seconds_table(self.planned_step_s, self.compiled_step_s),
        )


def seconds_table(planned: StepSeconds, compiled: StepSeconds) -> Shown:
    """The seconds of a plan and of its compiled program, by group."""
    rows = []
    for title, name in _GROUPS:
        p, c = getattr(planned, name), getattr(compiled, name)
        rows.append((title, seconds_text(p), seconds_text(c), f"{p / c:.2f}" if c else "-"))
    return (f"seconds a step; the compiler says {compiled.said:.0%} of the seconds of kernels",
            ("group", "predicted", "compiled", "predicted/compiled"), rows)  # fmt: skip


def corrections(planned: StepSeconds, compiled: StepSeconds) -> str:
    """The groups in which a compiled program differs from its plan by more than a tenth, as text."""
    pairs = [(title, getattr(planned, name), getattr(compiled, name)) for title, name in _GROUPS]
    return "; ".join(
        f"{title} {seconds_text(p)} -> {seconds_text(c)}" for title, p, c in pairs if abs(p - c) > 0.1 * max(p, c)
    )


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
    is left over on both sides is paired by `autopar.lower.aot.collectives`.

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
