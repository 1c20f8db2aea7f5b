"""`PipelineVerification`: what a plan of several stages predicts next to what the compiler made of its programs.

`compiled_plan` compiles a plan of any number of stages for a target and compares it. `compile_stages` compiles the
programs of a pipeline and says what a step of each stage runs and needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from jax import export

from autopar._compat.world import lowered_for
from autopar.errors import PlanMismatchError
from autopar.errors.names import counted
from autopar.frontend import Traced
from autopar.lower.aot.base import Target
from autopar.lower.aot.collectives import Key, counted_collectives
from autopar.lower.aot.estimates import StepSeconds, estimated, rates_of, together
from autopar.lower.aot.messages import CompiledCollective, CompiledSummary, ProgramRequest
from autopar.lower.aot.rows import CollectiveRow, ComparedCollectives, Shown, ShownVerification
from autopar.lower.aot.spawn import CompileJob, compile_for, compile_jobs
from autopar.lower.aot.verification import MEMORY_TOLERANCE, Verification, compare, join
from autopar.lower.pipeline.build import LoweredPipeline, lower_pipeline
from autopar.lower.pipeline.exported import placed_port, prepared
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.schedule import Work
from autopar.schedule.memory import WorkerMemory, worker_memory


@dataclass(frozen=True)
class StageCompilation:
    """The programs of a stage on their way through the compiler.

    Args:
        stage: its number.
        mesh_axes: (axis, size) of its mesh.
        lowered: runs a step of each collective before compiling, by kind, axes and bytes.
        equal: of these, those that a compiler can do without.
        collectives: of the compiled programs, each as often as it runs in a step.
        fusions: fusions of all its programs.
        cycles: cycles of a step as the compiler estimates them; None where it says none.
        programs: what each program was compiled to, by its work.
        texts: (runs a step, optimized HLO) of each program; empty where the texts were not kept.
    """

    stage: int
    mesh_axes: tuple[tuple[str, int], ...]
    lowered: Mapping[Key, float]
    equal: Mapping[Key, float]
    collectives: tuple[CompiledCollective, ...]
    fusions: int
    cycles: float | None
    programs: Mapping[Work, CompiledSummary]
    texts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class PipelineCompilation:
    """All stages of a pipeline, compiled.

    Args:
        device_kind: the compiler's name of the devices.
        stages: in order.
        memory: by worker.
        compile_s: seconds that compiling took, all programs together.
        hlo: texts of all programs.
    """

    device_kind: str
    stages: tuple[StageCompilation, ...]
    memory: tuple[WorkerMemory, ...]
    compile_s: float
    hlo: str


@lowered_for(gloo=False)
def compile_stages(target: Target, lowered: LoweredPipeline, timeout_s: float = 1800.0) -> PipelineCompilation:
    """Compiles every program of a pipeline for a target.

    Args:
        target: what to compile for, with as many devices as the plan has.
        lowered: the pipeline.
        timeout_s: seconds after which compiling is given up.

    Raises:
        AutoparError: the target's compiler is not installed, or fails.
    """
    target.check_installed()
    programs = [p for p in lowered.programs if p.results]
    done = compile_jobs(target, lowered.plan, [_job(target, lowered, p) for p in programs], timeout_s)
    compiled = {p.work: answer for p, (answer, _) in zip(programs, done, strict=True)}
    return gathered(lowered, compiled, {p.work: text for p, (_, text) in zip(programs, done, strict=True)})


def gathered(
    lowered: LoweredPipeline, compiled: Mapping[Work, CompiledSummary], texts: Mapping[Work, str] = MappingProxyType({})
) -> PipelineCompilation:
    """Totals of a pipeline's programs over a step.

    Args:
        lowered: the pipeline.
        compiled: what each of its programs was compiled to; those that return nothing are left out.
        texts: their optimized HLO.
    """
    return PipelineCompilation(
        next(iter(compiled.values())).device_kind,
        tuple(_stage(lowered, s, compiled, texts) for s in range(lowered.plan.num_stages)),
        worker_memory(lowered.instructions, {w: c.memory.temporaries for w, c in compiled.items()}),
        sum(c.compile_s for c in compiled.values()),
        "\n".join(f"// {work}\n{text}" for work, text in texts.items()),
    )


def _job(target: Target, lowered: LoweredPipeline, program: StageProgram) -> CompileJob:
    stage = program.work.stage
    axes = lowered.mesh_axes(stage)
    function, given = prepared(program, axes)
    exported = export.export(function, platforms=[target.platform])(*given)
    request = ProgramRequest(
        axes,
        lowered.devices(lowered.worker_of_stage(stage), stage),
        ((), *(placed_port(p).dims for p in program.reads)),
        tuple(placed_port(p).dims for p in program.results),
        (),
        {},
        tuple(n + 1 for n, p in enumerate(program.reads) if p.host),
        tuple(n for n, p in enumerate(program.results) if p.host),
    )
    return CompileJob(request, bytes(exported.serialize()))


def _runs(lowered: LoweredPipeline) -> Counter[Work]:
    """Runs of each program in a step, on all workers of its stage together."""
    runs = Counter(Work(t.kind, t.stage) for row in lowered.table.rows for t in row)
    runs.update(p.work for p in lowered.programs if p.work not in runs)
    return runs


def _stage(
    lowered: LoweredPipeline, stage: int, compiled: Mapping[Work, CompiledSummary], texts: Mapping[Work, str]
) -> StageCompilation:
    axes, runs = lowered.mesh_axes(stage), _runs(lowered)
    stage_programs = [p for p in lowered.programs if p.work.stage == stage and p.work in compiled]
    before: dict[Key, float] = defaultdict(float)
    equal: dict[Key, float] = defaultdict(float)
    collectives: list[CompiledCollective] = []
    for p in stage_programs:
        times = runs[p.work]
        for total, counts in zip((before, equal), counted_collectives(*prepared(p, axes), axes), strict=True):
            for key, count in counts.items():
                total[key] += times * count
        collectives += [
            msgspec.structs.replace(c, count=times * c.count, wire_bytes=times * c.wire_bytes)
            for c in compiled[p.work].collectives
        ]
    said = [(runs[p.work], compiled[p.work].cycles) for p in stage_programs]
    cycles = sum(n * c for n, c in said if c is not None)
    return StageCompilation(
        stage,
        axes,
        before,
        equal,
        tuple(collectives),
        sum(compiled[p.work].fusions for p in stage_programs),
        cycles if all(c is not None for _, c in said) else None,
        {p.work: compiled[p.work] for p in stage_programs},
        tuple((runs[p.work], texts[p.work]) for p in stage_programs if p.work in texts),
    )


@dataclass(frozen=True)
class StageVerification(ComparedCollectives):
    """Predicted and compiled figures of one stage of a pipeline.

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
class PipelineVerification(ShownVerification):
    """Result of `autopar.verify` for a plan of several stages; prints as tables.

    Args:
        program: name of the function.
        cluster: name of the cluster that the plan was made for.
        target: what was compiled for.
        device_kind: the compiler's name of the devices.
        schedule: name of the plan's schedule.
        num_microbatches: parts of the batch.
        stages: predicted and compiled figures of each stage.
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

    def _head(self) -> tuple[tuple[str, str], ...]:
        counts = counted(len(self.stages), "stage"), counted(self.num_microbatches, "microbatch")
        said = sum(s.predicted_sent_bytes for s in self.stages)
        sent = sum(s.sent_bytes for s in self.stages)
        worst = max((row.ratio for row in self.memory), key=lambda r: abs(r - 1))
        return (
            ("program", f"{self.program}, planned for {self.cluster}"),
            ("pipeline", ", ".join((*counts, self.schedule))),
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


def compiled_plan(
    traced: Traced, plan: Plan, target: Target, timeout_s: float = 1800.0
) -> Verification | PipelineVerification:
    """A plan compiled for a target, with its predictions.

    Args:
        traced: the function in the form that the plan was made for.
        plan: the plan, for as many devices as the target has.
        target: what to compile for.
        timeout_s: seconds after which compiling is given up.

    Raises:
        AutoparError: the target's compiler is not installed, or fails.
    """
    if plan.num_stages > 1:
        lowered = lower_pipeline(split_layers(traced, plan.content.stack_groups).step, plan, platform=target.platform)
        return compare_stages(plan, target, compile_stages(target, lowered, timeout_s))
    return compare(plan, traced.graph, target, compile_for(target, traced, plan, timeout_s))


def check_size(plan: Plan, target: Target) -> None:
    """Raises unless the plan has as many devices as the target."""
    devices = len({d for s in plan.stages for d in s.devices})
    if target.num_devices is not None and target.num_devices != devices:
        raise PlanMismatchError(
            f"the plan is for {counted(devices, 'device')} of {plan.content.cluster_name}; {target.text} has "
            f"{target.num_devices}",
            cause="the plan was made for another cluster",
            remedy="plan for the target's cluster, or name a target of that many devices",
        )
