"""The instructions that the simulator and all runtimes follow, and `Program`, the lists of all workers.

Each worker has a compute lane, which takes instructions in order, and lanes for sending in parallel. What each
instruction means for the values on a worker is defined by `autopar.schedule.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from autopar.errors import ScheduleError
from autopar.plan.pipeline import Reduce
from autopar.schedule.dataflow import Dataflow, Work
from autopar.schedule.table import Table

#: Microbatch of a buffer that belongs to the whole step, and worker of one that is not a copy from elsewhere.
NONE = -1


class Buffer(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Name of a buffer on a worker.

    Args:
        value: name of the value in the dataflow.
        microbatch: the microbatch whose copy it is, or `NONE`. A contribution to an accumulator has the
            microbatch that made it, the accumulator itself has none.
        origin: worker whose partial sum it is, where a stage has two workers; else `NONE`.
    """

    value: str
    microbatch: int = NONE
    origin: int = NONE

    def __str__(self) -> str:
        text = self.value if self.microbatch == NONE else f"{self.value}.{self.microbatch}"
        return text if self.origin == NONE else f"{text} of worker {self.origin}"


class _Instruction(msgspec.Struct, frozen=True, tag_field="do", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all instructions."""


class Run(_Instruction, frozen=True, tag="RUN"):
    """Run a program of a stage.

    Args:
        work: forward, backward, weight or before.
        microbatch: the microbatch, `NONE` for "before".
        reads: buffers, in the order of the work's ``reads``.
        writes: new buffers, in the order of the work's ``writes`` and then ``accumulates``.
        donate: those of ``reads`` that are gone afterwards; the program may write into them.
    """

    work: Work
    microbatch: int
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    donate: tuple[Buffer, ...] = ()


class Apply(_Instruction, frozen=True, tag="APPLY"):
    """Run a program of the update or where examples meet: as `Run`, once, with complete accumulators."""

    work: Work
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    donate: tuple[Buffer, ...] = ()


class Accumulate(_Instruction, frozen=True, tag="ACCUMULATE"):
    """Join a contribution, or another worker's partial sum, into an accumulator.

    Args:
        into: the accumulator.
        value: what is joined.
        reduce: how; "concatenate" puts it at the place of the microbatch of ``value``.
        first: there is no accumulator yet: it becomes ``value``.
        donate: ``value`` is gone afterwards.
    """

    into: Buffer
    value: Buffer
    reduce: Reduce
    first: bool = False
    donate: bool = False


class Send(_Instruction, frozen=True, tag="SEND"):
    """Send a copy of a buffer to another worker. The buffer stays.

    Args:
        value: the buffer.
        to: the worker that gets it.
        tag: the same as of the one RECV that takes it; unique in the program.
    """

    value: Buffer
    to: int
    tag: int


class Recv(_Instruction, frozen=True, tag="RECV"):
    """Take the next value that ``source`` sent to this worker, as a new buffer ``value``."""

    value: Buffer
    source: int
    tag: int


class Free(_Instruction, frozen=True, tag="FREE"):
    """Forget buffers. What a send still carries stays until it arrived."""

    values: tuple[Buffer, ...]


class Offload(_Instruction, frozen=True, tag="OFFLOAD"):
    """Move a buffer to the host's memory; nothing may use it there."""

    value: Buffer


class Fetch(_Instruction, frozen=True, tag="FETCH"):
    """Move an offloaded buffer back to the device."""

    value: Buffer


class Stash(_Instruction, frozen=True, tag="STASH"):
    """Keep the present contents of ``source`` as a new buffer ``target`` (weight stashing: a version of parameters)."""

    source: Buffer
    target: Buffer


Instruction: TypeAlias = Run | Apply | Accumulate | Send | Recv | Free | Offload | Fetch | Stash


class WorkerProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instructions of one worker in a step, in order."""

    worker: int
    instructions: tuple[Instruction, ...]


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The instruction lists of all workers, with the table and the dataflow that they carry out.

    Args:
        table: what each worker computes.
        dataflow: what the works read and write.
        workers: worker 0, 1, ...
    """

    table: Table
    dataflow: Dataflow
    workers: tuple[WorkerProgram, ...]

    def to_json(self) -> str:
        """The program as JSON; the same program gives the same text."""
        return msgspec.json.encode(self).decode() + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> Program:
        """The program that `to_json` wrote. ScheduleError on anything else; `verify` says whether it can run."""
        try:
            return msgspec.json.decode(text, type=Program)
        except msgspec.DecodeError as error:
            raise ScheduleError(f"the text is not a program of instructions: {error}") from error

    def __str__(self) -> str:
        return "\n".join(
            f"worker {w.worker}\n" + "".join(f"  {instruction_text(i)}\n" for i in w.instructions) for w in self.workers
        )


def instruction_text(i: Instruction) -> str:
    """One line, as ``RUN forward 0, microbatch 2: w, x.2 -> a.2 (donates x.2)``."""
    match i:
        case Run() | Apply():
            name = "APPLY" if isinstance(i, Apply) else "RUN"
            of = f", microbatch {i.microbatch}" if isinstance(i, Run) and i.microbatch != NONE else ""
            gone = f" (donates {_names(i.donate)})" if i.donate else ""
            return f"{name} {i.work}{of}: {_names(i.reads)} -> {_names(i.writes)}{gone}"
        case Accumulate():
            return f"ACCUMULATE {i.value} into {i.into} by {i.reduce}{' (first)' if i.first else ''}"
        case Send():
            return f"SEND {i.value} to worker {i.to}, tag {i.tag}"
        case Recv():
            return f"RECV {i.value} from worker {i.source}, tag {i.tag}"
        case Stash():
            return f"STASH {i.source} as {i.target}"
        case Free():
            return f"FREE {_names(i.values)}"
        case Offload():
            return f"OFFLOAD {i.value}"
        case Fetch():
            return f"FETCH {i.value}"


def blocked_text(lists: Sequence[Sequence[Instruction]], at: Sequence[int], stuck: Sequence[int]) -> str:
    """At which instruction each of the ``stuck`` workers waits, having carried out ``at`` of its list."""
    return "; ".join(f"worker {w} waits at {instruction_text(lists[w][at[w]])}" for w in stuck)


def _names(buffers: tuple[Buffer, ...]) -> str:
    return ", ".join(map(str, buffers)) or "nothing"


def used_by(i: Instruction) -> tuple[Buffer, ...]:
    """Buffers that must be there for an instruction."""
    match i:
        case Run() | Apply():
            return i.reads
        case Accumulate():
            return (i.value,) if i.first else (i.into, i.value)
        case Send() | Offload() | Fetch():
            return (i.value,)
        case Stash():
            return (i.source,)
        case Free():
            return i.values
        case Recv():
            return ()


def made_by(i: Instruction) -> tuple[Buffer, ...]:
    """Buffers that an instruction makes."""
    match i:
        case Run() | Apply():
            return i.writes
        case Accumulate():
            return (i.into,) if i.first else ()
        case Recv():
            return (i.value,)
        case Stash():
            return (i.target,)
        case _:
            return ()
