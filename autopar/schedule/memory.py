"""Bytes on each worker along its instruction list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from autopar.schedule.dataflow import Dataflow, Work
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Fetch,
    Free,
    Instruction,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
)
from autopar.schedule.table import Task


@dataclass(frozen=True)
class BufferUsage:
    """Bytes a device while an instruction runs, and after it."""

    during_bytes: int
    after_bytes: int


def starting_buffers(program: Program) -> tuple[tuple[Buffer, ...], ...]:
    """Inputs on each worker when the step begins."""
    table = program.table
    buffers: list[list[Buffer]] = [[] for _ in table.rows]
    for value in program.dataflow.values:
        if value.lifetime == "step":
            for worker in sorted({w for s in value.stages for w in table.workers_of_stage(s)}):
                buffers[worker].append(Buffer(value.name))
        elif value.is_input:
            for microbatch in range(table.num_microbatches):
                for worker in sorted({table.worker_of(Task("forward", s, microbatch)) for s in value.stages}):
                    buffers[worker].append(Buffer(value.name, microbatch))
    return tuple(map(tuple, buffers))


def usage(program: Program) -> tuple[tuple[BufferUsage, ...], ...]:
    """Bytes of each worker before its first instruction, then those of each instruction.

    What depends on the order of a list alone: a buffer counts from the instruction that makes it to the one that gives
    it up, whatever the times are. A value on its way between workers counts on both.

    Args:
        program: a program that `verify` accepts.
    """
    starts = starting_buffers(program)
    return tuple(_worker_usage(program, starts[w.worker], w.instructions) for w in program.workers)


def transit_bytes(program: Program, depth: int) -> tuple[int, ...]:
    """The most bytes a device of each worker in queues of ``depth`` values from it and to it.

    Args:
        program: a program that `verify` accepts.
        depth: values between two workers that were sent and not yet received.
    """
    sent: dict[tuple[int, int], list[int]] = {}
    for w in program.workers:
        for i in w.instructions:
            if isinstance(i, Send):
                sent.setdefault((w.worker, i.to), []).append(buffer_bytes(program, i.value))
    most_bytes = [0] * len(program.workers)
    for (source, target), sizes in sorted(sent.items()):
        most = max(sum(sizes[k : k + depth]) for k in range(len(sizes)))
        most_bytes[source] += most
        most_bytes[target] += most
    return tuple(most_bytes)


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes a device of a worker when its list of instructions needs the most.

    Args:
        worker: its number.
        stages: that it holds.
        live_bytes: bytes of arrays that lie there then.
        temporaries: bytes that the program that runs needs besides.
    """

    worker: int
    stages: tuple[int, ...]
    live_bytes: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return self.live_bytes + self.temporaries


def worker_memory(program: Program, temporaries: Mapping[Work, int]) -> tuple[WorkerMemory, ...]:
    """The largest need of memory of each worker along its list.

    Args:
        program: a program that `verify` accepts.
        temporaries: bytes a device that a compiler gave each program besides what it reads and writes.
    """
    flow = program.dataflow

    def along(bytes_of: Mapping[Work, int]) -> tuple[tuple[BufferUsage, ...], ...]:
        works = tuple(dataclasses.replace(w, temporaries_bytes=bytes_of.get(w.work, 0)) for w in flow.works)
        return usage(msgspec.structs.replace(program, dataflow=Dataflow(works, flow.values)))

    of_workers = []
    for worker, (arrays, everything) in enumerate(zip(along({}), along(temporaries), strict=True)):
        at = max(range(len(everything)), key=lambda i: everything[i].during_bytes)
        live_bytes, peak = arrays[at].during_bytes, everything[at].during_bytes
        of_workers.append(WorkerMemory(worker, program.table.stages_of_worker(worker), live_bytes, peak - live_bytes))
    return tuple(of_workers)


def held_bytes(program: Program, worker: int, parts: Sequence[Sequence[Instruction]]) -> list[tuple[int, ...]]:
    """Bytes a device of each buffer that a worker holds when each of its parts ends.

    Args:
        program: a program that `verify` accepts.
        worker: its number.
        parts: its list in parts.
    """
    live_bytes = {b: program.dataflow.by_name[b.value].bytes for b in starting_buffers(program)[worker]}
    offloaded: dict[Buffer, int] = {}
    held = []
    for turn in parts:
        for i in turn:
            _apply(program, i, live_bytes, offloaded)
        held.append(tuple(live_bytes.values()))
    return held


def _worker_usage(
    program: Program, start: tuple[Buffer, ...], lines: tuple[Instruction, ...]
) -> tuple[BufferUsage, ...]:
    live_bytes = {b: program.dataflow.by_name[b.value].bytes for b in start}
    offloaded: dict[Buffer, int] = {}
    total = sum(live_bytes.values())
    usages = [BufferUsage(total, total)]
    for i in lines:
        extra = _apply(program, i, live_bytes, offloaded)
        after = sum(live_bytes.values())
        usages.append(BufferUsage(max(total, after) + extra, after))
        total = after
    return tuple(usages)


def _apply(program: Program, i: Instruction, live_bytes: dict[Buffer, int], offloaded: dict[Buffer, int]) -> int:
    """Changes ``held`` as the instruction does; what it needs while it runs beyond the larger of before and after."""
    before = sum(live_bytes.values())
    extra = 0
    match i:
        case Run() | Apply():
            spec = program.dataflow.by_work[i.work]
            names = (*spec.writes, *spec.accumulates)
            for buffer, name in zip(i.writes, names, strict=True):
                live_bytes[buffer] = program.dataflow.by_name[name].bytes
            gone = {b: live_bytes.pop(b) for b in i.donate}
            written_bytes = sum(live_bytes[b] for b in i.writes)
            donated = dict(zip(spec.reads, i.reads, strict=True))
            shared = sum(
                min(gone[donated[r]], program.dataflow.by_name[w].bytes) for r, w in spec.aliases if donated[r] in gone
            )
            during = before + written_bytes - shared + spec.temporaries_bytes
            extra = during - max(before, before + written_bytes - sum(gone.values()))
        case Accumulate():
            size = live_bytes[i.value]
            if i.first:
                live_bytes[i.into] = size
            elif i.reduce == "concatenate":
                live_bytes[i.into] += size
            if i.donate:
                del live_bytes[i.value]
        case Recv():
            live_bytes[i.value] = buffer_bytes(program, i.value)
        case Stash():
            live_bytes[i.target] = live_bytes[i.source]
        case Free():
            for buffer in i.values:
                (live_bytes if buffer in live_bytes else offloaded).pop(buffer)
        case Offload():
            offloaded[i.value] = live_bytes.pop(i.value)
        case Fetch():
            live_bytes[i.value] = offloaded.pop(i.value)
        case _:
            pass
    return extra


def buffer_bytes(program: Program, buffer: Buffer) -> int:
    """Bytes a device of a buffer that is whole; 0 where its name is no value of the dataflow."""
    value = program.dataflow.by_name.get(buffer.value)
    if value is None:
        return 0
    # Accumulators are sent when they are complete.
    whole = value.reduce == "concatenate" and buffer.microbatch == NONE
    return value.bytes * (program.table.num_microbatches if whole else 1)
