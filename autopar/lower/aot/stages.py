"""Compiles the programs of a pipeline's stages for a target, and says what a step of each stage runs and needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from jax import export

from autopar.lower.aot.base import Target
from autopar.lower.aot.lowered import counted_collectives
from autopar.lower.aot.messages import CompiledCollective, CompiledSummary, ProgramRequest
from autopar.lower.aot.rewrites import Key
from autopar.lower.aot.spawn import CompileJob, compile_jobs
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.exported import placed_port, prepared
from autopar.lower.pipeline.stage_program import StageProgram
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
