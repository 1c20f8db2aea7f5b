"""FREE and donation: every buffer is given up by the last instruction that uses it, or right after it."""

from __future__ import annotations

import msgspec

from autopar.schedule.dataflow import Dataflow
from autopar.schedule.instructions import (
    Accumulate,
    Apply,
    Buffer,
    Free,
    Instruction,
    Run,
    WorkerProgram,
    made_by,
    used_by,
)
from autopar.schedule.table import Table


def free_early(table: Table, dataflow: Dataflow, workers: tuple[WorkerProgram, ...]) -> tuple[WorkerProgram, ...]:
    """The lists with buffers donated where their last use can take them over, else freed right after it.

    What belongs to the caller stays: inputs that are not donated, and results on the workers that made them.

    Args:
        table: the table of the lists.
        dataflow: its dataflow.
        workers: what `place` made; FREE and donations that it has already stay.
    """
    return tuple(_freed(table, dataflow, worker) for worker in workers)


def stays(table: Table, dataflow: Dataflow, worker: int, buffer: Buffer) -> bool:
    """Whether ``buffer`` on ``worker`` belongs to the caller at the end of the step."""
    spec = dataflow.by_name.get(buffer.value)
    if spec is None or (spec.lifetime == "accumulator" and buffer != Buffer(spec.name)):
        return False
    if spec.is_input:
        homes = {w for s in spec.stages for w in table.workers_of_stage(s)}
        return not spec.donated and worker in homes
    return spec.result and worker in table.workers_of_stage(dataflow.writers[spec.name].stage)


def _freed(table: Table, dataflow: Dataflow, worker: WorkerProgram) -> WorkerProgram:
    last: dict[Buffer, int] = {}
    for number, i in enumerate(worker.instructions):
        for buffer in (*used_by(i), *made_by(i)):
            last[buffer] = number
    gone = {b for i in worker.instructions for b in _given_up(i)}
    endings: dict[int, list[Buffer]] = {}
    for buffer, number in last.items():
        if buffer not in gone and not stays(table, dataflow, worker.worker, buffer):
            endings.setdefault(number, []).append(buffer)
    lines: list[Instruction] = []
    for number, i in enumerate(worker.instructions):
        ending = sorted(endings.get(number, ()))
        changed, rest = _donated(i, ending)
        lines.append(changed)
        if rest:
            lines.append(Free(tuple(rest)))
    return WorkerProgram(worker.worker, tuple(lines))


def _given_up(i: Instruction) -> tuple[Buffer, ...]:
    match i:
        case Free():
            return i.values
        case Run() | Apply():
            return i.donate
        case Accumulate():
            return (i.value,) if i.donate else ()
        case _:
            return ()


def _donated(i: Instruction, ending: list[Buffer]) -> tuple[Instruction, list[Buffer]]:
    """The instruction with those of ``ending`` donated that it can take, and the others."""
    match i:
        case Run() | Apply():
            # One buffer for two arguments cannot be donated.
            taken = [b for b in ending if i.reads.count(b) == 1]
        case Accumulate():
            taken = [b for b in ending if b == i.value]
        case _:
            taken = []
    if not taken:
        return i, ending
    flag = tuple(sorted((*i.donate, *taken))) if isinstance(i, Run | Apply) else True
    return msgspec.structs.replace(i, donate=flag), [b for b in ending if b not in taken]
