"""`PipelineVerification`: what a plan of several stages predicts next to what the compiler made of its programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autopar.lower.aot.base import Target
from autopar.lower.aot.compare import join
from autopar.lower.aot.estimates import StepSeconds, estimated, together
from autopar.lower.aot.planned import rates_of
from autopar.lower.aot.rows import CollectiveRow, ComparedCollectives, Shown, as_html, as_text
from autopar.lower.aot.stages import PipelineCompilation, StageCompilation
from autopar.lower.aot.verification import MEMORY_TOLERANCE
from autopar.plan import Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.schedule.memory import WorkerMemory


@dataclass(frozen=True)
class StageVerification(ComparedCollectives):
    """A stage.

    Args:
        stage: its number.
        mesh_axes: (axis, size) of its mesh.
        rows: collectives of a step, those that differ first; sends between stages are none of them.
        sent_bytes: bytes that a device sends a step in the collectives of the compiled programs as they are.
        fusions: fusions of its compiled programs.
        cycles: cycles of a step as the compiler estimates them; None where it says none.
        predicted_step_s: busy seconds a step that the plan predicts.
        compiled_step_s: seconds a step of its compiled programs by group of operators, see `StepSeconds`.
    """

    stage: int
    mesh_axes: tuple[tuple[str, int], ...]
    rows: tuple[CollectiveRow, ...]
    sent_bytes: float
    fusions: int
    cycles: float | None
    predicted_step_s: float
    compiled_step_s: StepSeconds


@dataclass(frozen=True)
class WorkerRow:
    """Memory of the devices of one worker.

    Args:
        predicted: bytes a device that the plan says for its stages together.
        compiled: what its list of instructions needs with the compiled programs.
    """

    predicted: int
    compiled: WorkerMemory

    @property
    def ratio(self) -> float:
        """Predicted bytes over those that the compiler says."""
        return self.predicted / max(1, self.compiled.total)

    @property
    def ok(self) -> bool:
        """Whether they are within 10%."""
        return abs(self.ratio - 1) <= MEMORY_TOLERANCE


@dataclass(frozen=True)
class PipelineVerification:
    """Result of `autopar.verify` for a plan of several stages; prints as tables.

    Args:
        program: name of the function.
        cluster: name of the cluster that the plan was made for.
        target: what was compiled for.
        device_kind: the compiler's name of the devices.
        schedule: name of the plan's schedule.
        num_microbatches: parts of the batch.
        stages: see `StageVerification`.
        memory: by worker.
        predicted_step_s: seconds a step that the plan predicts.
        compile_s: seconds that compiling took.
        hlo: the optimized HLO of all programs.
    """

    program: str
    cluster: str
    target: str
    device_kind: str
    schedule: str
    num_microbatches: int
    stages: tuple[StageVerification, ...]
    memory: tuple[WorkerRow, ...]
    predicted_step_s: float
    compile_s: float = field(compare=False)
    hlo: str = field(default="", repr=False, compare=False)

    @property
    def compiled_step_s(self) -> StepSeconds:
        """The seconds of the stage that computes longest, by group; the bubble of the schedule is not in them."""
        return max((s.compiled_step_s for s in self.stages), key=lambda seconds: seconds.total_s)

    @property
    def footprint_bytes(self) -> int:
        """Bytes that the fullest device needs."""
        return max(row.compiled.total for row in self.memory)

    @property
    def corrected_step_s(self) -> float:
        """Seconds a step: those of the plan, times how much longer the busiest stage is compiled than predicted."""
        busiest = max(s.predicted_step_s for s in self.stages)
        return self.predicted_step_s * self.compiled_step_s.total_s / busiest if busiest else self.predicted_step_s

    @property
    def corrections(self) -> str:
        """Stages whose seconds differ by more than a tenth."""
        pairs = [(s.stage, s.predicted_step_s, s.compiled_step_s.total_s) for s in self.stages]
        return "; ".join(
            f"stage {n} {seconds_text(p)} -> {seconds_text(c)}" for n, p, c in pairs if abs(p - c) > 0.1 * max(p, c)
        )

    @property
    def lowered_ok(self) -> bool:
        """Whether the programs that the compiler is given have exactly the predicted collectives."""
        return all(s.lowered_ok for s in self.stages)

    @property
    def collectives_ok(self) -> bool:
        """Whether on every stage of every kind as many are compiled as were predicted, with bytes within 2%."""
        return all(s.collectives_ok for s in self.stages)

    @property
    def explained(self) -> bool:
        """Whether every collective is as predicted, or was rewritten by XLA in a way that is known and named."""
        return all(s.explained for s in self.stages)

    @property
    def memory_ok(self) -> bool:
        """Whether predicted peak memory of every worker is within 10% of what its programs need."""
        return all(row.ok for row in self.memory)

    @property
    def ok(self) -> bool:
        """Whether collectives and memory are as predicted."""
        return self.collectives_ok and self.memory_ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the HLO."""
        return {
            "program": self.program,
            "cluster": self.cluster,
            "target": self.target,
            "device_kind": self.device_kind,
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "ok": self.ok,
            "lowered_ok": self.lowered_ok,
            "collectives_ok": self.collectives_ok,
            "explained": self.explained,
            "memory_ok": self.memory_ok,
            "stages": [
                {
                    "stage": s.stage,
                    "mesh": dict(s.mesh_axes),
                    **s.collectives_dict(),
                    "predicted_sent_bytes": s.predicted_sent_bytes,
                    "compiled_sent_bytes": s.sent_bytes,
                    "fusions": s.fusions,
                    "cycles": s.cycles,
                    "compiled_step_s": msgspec.structs.asdict(s.compiled_step_s),
                }
                for s in self.stages
            ],
            "memory": [
                {
                    "worker": row.compiled.worker,
                    "stages": list(row.compiled.stages),
                    "predicted": row.predicted,
                    "compiled": row.compiled.total,
                    "held": row.compiled.live_bytes,
                    "temporaries": row.compiled.temporaries,
                }
                for row in self.memory
            ],
            "predicted_step_s": self.predicted_step_s,
            "compile_s": self.compile_s,
        }

    def __str__(self) -> str:
        return as_text(self._head(), self._tables())

    def _repr_html_(self) -> str:
        return as_html(self._head(), self._tables())

    def _head(self) -> tuple[tuple[str, str], ...]:
        said = sum(s.predicted_sent_bytes for s in self.stages)
        sent = sum(s.sent_bytes for s in self.stages)
        worst = max((row.ratio for row in self.memory), key=lambda r: abs(r - 1))
        return (
            ("program", f"{self.program}, planned for {self.cluster}"),
            ("pipeline", f"{len(self.stages)} stages, {self.num_microbatches} microbatches, {self.schedule}"),
            ("target", f"{self.target} ({self.device_kind}), compiled in {seconds_text(self.compile_s)}"),
            (
                "collectives",
                f"{'as predicted' if self.collectives_ok else 'not as predicted'}; a device of each stage together "
                f"sends {bytes_text(said)} predicted, {bytes_text(sent)} compiled",
            ),
            (
                "memory",
                f"{'within' if self.memory_ok else 'not within'} {MEMORY_TOLERANCE:.0%}: predicted/compiled "
                f"{worst:.3f} where it is furthest off",
            ),
            ("step time", f"{seconds_text(self.predicted_step_s)} predicted"),
        )

    def _tables(self) -> Sequence[Shown]:
        tables: list[Shown] = [
            (
                "memory a device",
                ("worker", "stages", "predicted", "compiled", "held", "temporaries", "predicted/compiled"),
                [
                    (
                        str(row.compiled.worker), ", ".join(map(str, row.compiled.stages)), bytes_text(row.predicted),
                        bytes_text(row.compiled.total), bytes_text(row.compiled.live_bytes),
                        bytes_text(row.compiled.temporaries), f"{row.ratio:.3f}",
                    )
                    for row in self.memory
                ],
            )
        ]  # fmt: skip
        for s in self.stages:
            mesh = " x ".join(f"{n}@{a}" for a, n in s.mesh_axes)
            for title, header, rows in s.collectives_tables():
                tables.append((f"stage {s.stage}, mesh {mesh}, {s.collectives_verdict()}: {title}", header, rows))
        return tables


def compare_stages(plan: Plan, target: Target, done: PipelineCompilation) -> PipelineVerification:
    """The contents of a `PipelineVerification`.

    Args:
        plan: a plan of several stages.
        target: what was compiled for.
        done: what became of it.
    """
    stages = []
    for stage, compiled in zip(plan.stages, done.stages, strict=True):
        said = [c for c in stage.collectives if c.kind != "send"]
        stages.append(
            StageVerification(
                compiled.stage,
                stage.mesh_axes,
                join(said, compiled.collectives, stage.mesh_axes, compiled.lowered, compiled.equal),
                sum(c.wire_bytes for c in compiled.collectives),
                compiled.fusions,
                compiled.cycles,
                stage.step_time,
                _seconds(Plan(plan.content.parts[compiled.stage]), target, compiled),
            )
        )
    memory = tuple(WorkerRow(sum(plan.stages[s].memory.total for s in m.stages), m) for m in done.memory)
    content = plan.content
    return PipelineVerification(
        content.program,
        content.cluster_name,
        target.text,
        done.device_kind,
        plan.schedule,
        plan.num_microbatches,
        tuple(stages),
        memory,
        plan.step_time,
        done.compile_s,
        done.hlo,
    )


def _seconds(part: Plan, target: Target, compiled: StageCompilation) -> StepSeconds:
    """The seconds of all programs of a stage, as often as each runs; ``part`` is the plan of the stage's own graph."""
    rates = rates_of(target, part)
    return together([estimated(text, rates).times(runs) for runs, text in compiled.texts])
