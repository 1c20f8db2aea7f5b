"""Messages between the driver and the workers, as plain data (MessagePack)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec

from autopar.cost.calibration import Sample
from autopar.cost.links import How
from autopar.lower.pipeline.exported import Axes, ExportedProgram, PlacedPort
from autopar.runtime.measuring import Effort
from autopar.runtime.shards import Leaf
from autopar.runtime.transport.tiles import ShardLayout
from autopar.schedule import Buffer, Instruction
from autopar.schedule.without_flush.ampnet import AmpFlow

_M = TypeVar("_M", bound=msgspec.Struct)


class Handshake(msgspec.Struct, frozen=True):
    """Identity of a process.

    Args:
        process: its number.
        secret: what its connections begin with.
        monitor: where it reports to: host and port.
        listen: address that it listens on; empty means that of its machine.
        cache: folder of compiled programs; empty for none.
        programs: hashes of the files there by name, others are removed; None where the folder is the user's.
        identity: certificate and key in PEM; empty where connections are not encrypted.
        devices: how many of the process's devices it has, from ``first_device`` on; 0 means all.
        first_device: the first of them.
        rank: its number among the processes that `jax.distributed` joins: those of its worker, or all of a world.
        group_size: number of these processes.
        board: name of the memory that processes of the driver's machine report by; empty for none.
    """

    process: int
    secret: bytes
    monitor: tuple[str, int]
    listen: str
    cache: str = ""
    programs: dict[str, str] | None = None
    identity: tuple[bytes, bytes] | None = None
    devices: int = 0
    first_device: int = 0
    rank: int = 0
    group_size: int = 1
    board: str = ""


class WorkerInfo(msgspec.Struct, frozen=True):
    """Answer to `Handshake`.

    Args:
        address: where the process listens for others.
        process: id of the process.
        machine: the same for all processes that may kill each other by that id.
        coordinator: host and port that the first of several joined processes keeps for `jax.distributed`.
    """

    address: tuple[str, int]
    process: int
    machine: str
    coordinator: str = ""


class PlannedMove(msgspec.Struct, frozen=True, array_like=True):
    """An array that goes from one worker to another by a program of both.

    Args:
        shape: of the array, of typed keys without that of their data.
        dtype: its short name.
        axes: of the sender's mesh.
        source: how it lies there.
        target_axes: of the receiver's mesh.
        target: how it is to lie there.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    source: PlacedPort
    target_axes: Axes
    target: PlacedPort


class PlannedExchange(msgspec.Struct, frozen=True):
    """Values that one worker sends to another at once.

    Args:
        tags: of the values, in order.
        source: worker that sends.
        target: worker that receives.
        moves: a move for each value.
    """

    tags: tuple[int, ...]
    source: int
    target: int
    moves: tuple[PlannedMove, ...]


class Load(msgspec.Struct, frozen=True):
    """Programs and instructions of a function on one worker.

    Args:
        function: its number.
        instructions: of one step.
        programs: of its stages.
        addresses: of all processes.
        groups: number of processes of each worker.
        layouts: how values lie on workers that have several processes, by name.
        direct: whether arrays are pulled from device to device.
        x64: whether 64-bit types are enabled.
        amp: AMPNet, whose passes come in an order of their own; None where the instructions are followed.
        exchanges: of a world what this worker sends and receives, in the order in which it does; else None.
    """

    function: int
    instructions: tuple[Instruction, ...]
    programs: tuple[ExportedProgram, ...]
    addresses: dict[int, tuple[str, int]]
    groups: tuple[int, ...]
    layouts: dict[int, dict[str, ShardLayout]] = {}
    direct: bool = False
    x64: bool = False
    amp: AmpFlow | None = None
    exchanges: tuple[PlannedExchange, ...] | None = None


class Start(msgspec.Struct, frozen=True):
    """A value that lies on a worker when a step begins.

    Args:
        value: its name in the dataflow.
        id: number of the array that it is.
        microbatches: of a batch the microbatches that this worker takes; empty for whole values.
        dim: the dim of a batch that is cut.
        count: number of pieces that it is cut into.
        buffer: as what a whole value lies there; the buffer of its name where it is None.
        first: number of the buffer of microbatch 0.
    """

    value: str
    id: int
    microbatches: tuple[int, ...] = ()
    dim: int = 0
    count: int = 1
    buffer: Buffer | None = None
    first: int = 0


class Move(msgspec.Struct, frozen=True):
    """An array that one worker has and another needs too.

    Args:
        id: its number.
        source: worker that has it.
        target: worker that needs it.
        value: as what.
    """

    id: int
    source: int
    target: int
    value: str


class StepRequest(msgspec.Struct, frozen=True):
    """A step of one worker.

    Args:
        function: number of what runs.
        number: of the step, of all steps of the cluster.
        starts: what lies here at its beginning.
        moves: arrays that go from worker to worker before it, all of them, in one order.
        results: (number of the new array, buffer) of what is kept.
        forget: arrays that nobody has a handle to any more.
        deadline_s: seconds that it may take.
        timed: whether times of instructions are measured, for which the worker waits for every program.
        tell_size: results of up to this many elements are told with the answer.
        order: of AMPNet's passes, as letters; empty takes the first that can run.
    """

    function: int
    number: int
    starts: tuple[Start, ...]
    moves: tuple[Move, ...]
    results: tuple[tuple[int, Buffer], ...]
    forget: tuple[int, ...]
    deadline_s: float
    timed: bool = False
    tell_size: int = 8
    order: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a worker did not finish a step.

    Args:
        index: instruction that it was at; -1 before the first.
        kind: a connection broke, nothing came, a program of several processes failed, or an error of its own.
        peer: process at the other end of the connection; -1 where it is its own error.
        text: the error.
    """

    index: int
    kind: Literal["broken", "silent", "collective", "error"]
    peer: int
    text: str


class Timed(msgspec.Struct, frozen=True, array_like=True):
    """Begin and end of an instruction, by the clock of its machine."""

    index: int
    start_s: float
    end_s: float


class Snapshot(msgspec.Struct, frozen=True):
    """Arrays that are kept for a checkpoint until they are written, whatever becomes of them meanwhile.

    Args:
        ticket: number of the checkpoint.
        names: by number of the array what it is called there.
    """

    ticket: int
    names: dict[int, str]


class ReadRequest(msgspec.Struct, frozen=True):
    """Arrays of a checkpoint that a process reads.

    Args:
        folder: where it is.
        leaves: by the number that an array gets.
        like: by number an array of the process that lies as it is to lie.
    """

    folder: str
    leaves: dict[int, Leaf]
    like: dict[int, int]


class FileResult(msgspec.Struct, frozen=True):
    """Result of reading or writing a checkpoint.

    Args:
        written: what was written, by name.
        file: that went wrong; empty where none did.
        error: how.
    """

    written: dict[str, Leaf] = {}
    file: str = ""
    error: str = ""


class StepResult(msgspec.Struct, frozen=True):
    """Answer to `StepRequest`.

    Args:
        failure: why it was not finished; None where it was.
        times: of its instructions, where they were timed.
        sent_bytes: that the process sent to others meanwhile.
        queued: arrays that waited to be sent, at most.
        order: that AMPNet's passes had.
    """

    failure: Failure | None
    times: tuple[Timed, ...] = ()
    sent_bytes: int = 0
    queued: int = 0
    order: str = ""


class DeviceFacts(msgspec.Struct, frozen=True):
    """The devices of a process; to `Cluster.local` like one of them.

    Args:
        platform: jax's name of their platform.
        device_kind: jax's name of their kind.
        devices: how many there are.
        memory_bytes: that jax may allocate on one; None where it does not say.
        name: of the processor or accelerator.
        versions: of jax.
    """

    platform: str
    device_kind: str
    devices: int
    memory_bytes: int | None
    name: str
    versions: str

    def memory_stats(self) -> dict[str, int]:
        """Statistics as of a device of jax."""
        return {} if self.memory_bytes is None else {"bytes_limit": self.memory_bytes}


class Measure(msgspec.Struct, frozen=True):
    """Asks processes to measure their devices.

    Args:
        effort: how much is measured.
        processes: those that do it.
    """

    effort: Effort
    processes: tuple[int, ...]


class MeasureResult(msgspec.Struct, frozen=True):
    """Answer to `Measure`; nothing from others."""

    samples: tuple[Sample, ...] = ()


class Connect(msgspec.Struct, frozen=True):
    """Tells processes of each other, so that they can exchange arrays without a pipeline.

    Args:
        addresses: of all.
        direct: whether arrays are pulled from device to device.
        world: whether they form one world, by whose programs arrays go.
    """

    addresses: dict[int, tuple[str, int]]
    direct: bool
    world: bool = False


class TransferRequest(msgspec.Struct, frozen=True):
    """Asks workers to send arrays to each other and time it.

    Args:
        how: what is done.
        workers: those who take part.
        sizes: bytes of an array, one after the other.
        lanes: devices that an array lies on.
        count: arrays of a chain.
        deadline_s: seconds that all may take.
    """

    how: How
    workers: tuple[int, ...]
    sizes: tuple[int, ...]
    lanes: int
    count: int = 1
    deadline_s: float = math.inf


class TransferResult(msgspec.Struct, frozen=True):
    """Result of a `TransferRequest`.

    Args:
        seconds: of each size, of who began.
        equal: whether all arrived that should.
    """

    seconds: tuple[float, ...] = ()
    equal: bool = True


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


#: Made at once: msgspec looks a type up when it is first decoded, which several threads must not do at the same time.
_DECODERS: Mapping[type[Any], msgspec.msgpack.Decoder[Any]] = MappingProxyType(
    {
        kind: msgspec.msgpack.Decoder(kind)
        for kind in (
            Handshake, WorkerInfo, Load, StepRequest, Snapshot, ReadRequest, FileResult, StepResult, DeviceFacts,
            Measure,
            MeasureResult, Connect, TransferRequest, TransferResult,
        )
    }
)  # fmt: skip


def decode(data: bytes, kind: type[_M]) -> _M:
    """The message of these bytes."""
    message: _M = _DECODERS[kind].decode(data)
    return message
