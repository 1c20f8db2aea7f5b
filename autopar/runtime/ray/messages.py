"""What the driver and the workers say to each other, as plain data (MessagePack)."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from autopar.lower.pipeline.exported import ExportedProgram
from autopar.schedule import Buffer, Instruction

_M = TypeVar("_M", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True):
    """Who a worker is.

    Args:
        worker: its number.
        secret: what its connections begin with.
        monitor: where it reports to: host and port.
        listen: address that it listens on.
        x64: whether 64-bit types are enabled.
        cache: folder of compiled programs; empty for none.
        devices: how many of the process's devices it has, from ``first_device`` on; 0 means all.
        first_device: see ``devices``.
    """

    worker: int
    secret: bytes
    monitor: tuple[str, int]
    listen: str
    x64: bool
    cache: str = ""
    devices: int = 0
    first_device: int = 0


class Here(msgspec.Struct, frozen=True):
    """Answer to `Hello`.

    Args:
        address: where the worker listens for others.
        devices: number of its devices.
        platform: their kind.
        process: id of its process.
        machine: the same for all processes that may kill each other by that id.
    """

    address: tuple[str, int]
    devices: int
    platform: str
    process: int
    machine: str


class Load(msgspec.Struct, frozen=True):
    """Programs and instructions of a worker; `instructions` of one step."""

    instructions: tuple[Instruction, ...]
    programs: tuple[ExportedProgram, ...]
    addresses: dict[int, tuple[str, int]]


class Start(msgspec.Struct, frozen=True):
    """A value that lies on a worker when a step begins.

    Args:
        value: its name in the dataflow.
        id: number of the array that it is.
        microbatches: of a batch the microbatches that this worker takes; empty for whole values.
        dim: the dim of a batch that is cut.
        count: number of pieces that it is cut into.
    """

    value: str
    id: int
    microbatches: tuple[int, ...] = ()
    dim: int = 0
    count: int = 1


class Move(msgspec.Struct, frozen=True):
    """An array that one worker has and another needs too."""

    id: int
    source: int
    target: int


class Step(msgspec.Struct, frozen=True):
    """A step of one worker.

    Args:
        number: of the step.
        starts: what lies here at its beginning.
        moves: arrays that go from worker to worker before it, all of them, in one order.
        results: (number of the new array, buffer) of what is kept.
        forget: arrays that nobody has a handle to any more.
        deadline_s: seconds that it may take.
        timed: whether times of instructions are measured, for which the worker waits for every program.
        tell_size: results of up to this many elements are told with the answer.
    """

    number: int
    starts: tuple[Start, ...]
    moves: tuple[Move, ...]
    results: tuple[tuple[int, Buffer], ...]
    forget: tuple[int, ...]
    deadline_s: float
    timed: bool = False
    tell_size: int = 8


class Failure(msgspec.Struct, frozen=True):
    """Why a worker did not finish a step.

    Args:
        index: instruction that it was at; -1 before the first.
        kind: a connection broke, nothing came, or an error of its own.
        peer: worker at the other end of the connection; -1 where it is its own error.
        text: the error.
    """

    index: int
    kind: Literal["broken", "silent", "error"]
    peer: int
    text: str


class Timed(msgspec.Struct, frozen=True, array_like=True):
    """When an instruction began and ended, by the clock of its machine."""

    index: int
    start_s: float
    end_s: float


class Done(msgspec.Struct, frozen=True):
    """Answer to `Step`: ``failure`` is None where it was finished."""

    failure: Failure | None
    times: tuple[Timed, ...] = ()


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_M]) -> _M:
    """The message of these bytes."""
    return msgspec.msgpack.decode(data, type=kind)
