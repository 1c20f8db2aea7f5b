"""`Pipelined`: everything of a lowered pipeline that a driver needs, and what follows from it for each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar._compat.dtypes import jax_dtype
from autopar.ir import Input, TensorType
from autopar.lower.pipeline.exported import Axes, ExportedProgram, export_program, placed_port
from autopar.lower.pipeline.stage_program import Port, StageProgram, given_up_by_all
from autopar.schedule import NONE, Buffer, Program, Task, instruction_text, made_by
from autopar.schedule.instructions import Instruction
from autopar.schedule.without_flush.ampnet import AmpFlow


@dataclass(frozen=True)
class ArrayPlace:
    """Place of an input of the step on one worker.

    Args:
        value: name of the value there.
        index: index of the input.
        microbatches: those that the worker takes; empty for whole values.
        dim: dim of a batch that is cut.
        buffer: as what a whole value lies there; the buffer of its name where it is None.
        first: number of the buffer of microbatch 0.
    """

    value: str
    index: int
    microbatches: tuple[int, ...] = ()
    dim: int = 0
    buffer: Buffer | None = None
    first: int = 0


@dataclass(frozen=True)
class Result:
    """Source of an output of the step.

    Args:
        worker: who has it at the end.
        buffer: as what.
        type: its type.
        placement: how it lies, for people.
    """

    worker: int
    buffer: Buffer
    type: TensorType
    placement: str

    @property
    def dtype(self) -> Any:
        """Dtype of the output, for jax."""
        return jax_dtype(self.type.dtype)


@dataclass(frozen=True, eq=False)
class Pipelined:
    """A lowered pipeline.

    Args:
        program: the instruction lists.
        programs: of all stages.
        axes: mesh axes of each stage.
        inputs: inputs of the step.
        batch: for each input that is cut into microbatches its dim, by name.
        places: for each worker what lies there when a step begins.
        results: where each output of the step is when it ends.
        amp: AMPNet, whose passes come in an order of their own; None where the lists are followed.
    """

    program: Program
    programs: tuple[StageProgram, ...]
    axes: tuple[Axes, ...]
    inputs: tuple[Input, ...]
    batch: Mapping[str, int]
    places: tuple[tuple[ArrayPlace, ...], ...]
    results: tuple[Result, ...]
    amp: AmpFlow | None = None

    def exported(self, platform: str) -> tuple[ExportedProgram, ...]:
        """All programs, serialized. Buffers that no later instruction reads are donated to them.

        Args:
            platform: jax's name of the workers' devices.
        """
        stages = [self.stages(w) for w in range(self.num_workers)]
        return tuple(
            export_program(p, self.axes[p.work.stage], platform, given_up_by_all(self.program, stages, p.work))
            for p in self.programs
            if p.results
        )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.program.table.num_workers

    def stages(self, worker: int) -> tuple[int, ...]:
        """Stages of a worker."""
        return self.program.table.stages_of_worker(worker)

    def instruction(self, worker: int, index: int) -> Instruction | None:
        """An instruction of a worker; None before the first and after the last."""
        line = self.program.workers[worker].instructions
        return line[index] if 0 <= index < len(line) else None


def pipelined(
    program: Program,
    programs: tuple[StageProgram, ...],
    axes: tuple[Axes, ...],
    inputs: tuple[Input, ...],
    num_outputs: int,
    batch: Mapping[str, int],
) -> Pipelined:
    """A pipeline with a flush, whose step begins with its inputs and ends with its outputs, ``num_outputs`` of them.

    Other arguments are those of `Pipelined`.
    """
    places = places_of_inputs(program, inputs, batch)
    return Pipelined(program, programs, axes, inputs, batch, places, _results(program, programs, axes, num_outputs))


def places_of_inputs(
    program: Program, inputs: tuple[Input, ...], batch: Mapping[str, int]
) -> tuple[tuple[ArrayPlace, ...], ...]:
    """Values on each worker at the beginning of a step, of a program whose workers begin with inputs alone.

    Args:
        program: its instruction lists.
        inputs: of the step.
        batch: for each input that is cut into microbatches its dim, by name.
    """
    table = program.table
    index = {i.name: n for n, i in enumerate(inputs)}
    places: list[list[ArrayPlace]] = [[] for _ in range(table.num_workers)]
    for v in program.dataflow.values:
        if not v.is_input:
            continue
        assert v.ref is not None, f"{v.name} is of no value of the step"
        name = v.ref.name
        for stage in v.stages:
            for worker in table.workers_of_stage(stage):
                if v.ref.kind == "in":
                    places[worker].append(ArrayPlace(v.name, index[name]))
                    continue
                microbatches = tuple(
                    k for k in range(table.num_microbatches) if table.worker_of(Task("forward", stage, k)) == worker
                )
                places[worker].append(ArrayPlace(v.name, index[name], microbatches, batch[name]))
    return tuple(map(tuple, places))


def _results(
    program: Program, programs: tuple[StageProgram, ...], axes: tuple[Axes, ...], num_outputs: int
) -> tuple[Result, ...]:
    ports = {p.name: (p, stage_program.work.stage) for stage_program in programs for p in stage_program.results}
    values = program.dataflow.by_name
    results: dict[int, Result] = {}
    for w in program.workers:
        for i in w.instructions:
            for b in made_by(i):
                ref = values[b.value].ref
                if ref is not None and ref.kind == "out" and b.microbatch == NONE and ref.number not in results:
                    port, stage = ports[b.value]
                    results[ref.number] = Result(w.worker, b, port.type, placement_text(w.worker, axes[stage], port))
    return tuple(results[n] for n in range(num_outputs))


def placement_text(worker: int, axes: Axes, port: Port) -> str:
    """Layout of a value on a worker, for people.

    Args:
        worker: who has it.
        axes: of the mesh.
        port: the value there.
    """
    return f"worker {worker}, {_mesh_text(axes)}, {_spec_text(placed_port(port).dims)}"


def _mesh_text(axes: Axes) -> str:
    return " x ".join(f"{n} {size}" for n, size in axes)


def _spec_text(dims: tuple[tuple[str, ...], ...]) -> str:
    if not any(dims):
        return "replicated"
    return "split " + ", ".join(f"dim {d} over {' and '.join(axes)}" for d, axes in enumerate(dims) if axes)


def doing(instruction: Instruction | None) -> tuple[str | None, int | None]:
    """An instruction for people, short, and its microbatch."""
    if instruction is None:
        return None, None
    text = instruction_text(instruction).partition(": ")[0]
    number = getattr(instruction, "microbatch", NONE)
    if number == NONE:
        value = getattr(instruction, "value", None)
        number = NONE if value is None else value.microbatch
    return text, None if number == NONE else number
