"""`Verification`: what a plan predicts next to what XLA's compiler made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autopar.lower.aot.estimates import StepSeconds
from autopar.lower.aot.messages import CompiledMemory
from autopar.lower.aot.rows import CollectiveRow, ComparedCollectives, Shown, as_html, as_text, listed
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


@dataclass(frozen=True)
class Verification(ComparedCollectives):
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

    def __str__(self) -> str:
        return as_text(self._head(), self._tables())

    def _repr_html_(self) -> str:
        return as_html(self._head(), self._tables())

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
