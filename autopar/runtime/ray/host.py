"""`WorkerHost`: what runs in a worker's process. Knows neither Ray nor who calls it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.collectives import use_gloo
from autopar.lower.pipeline.exported import ExportedProgram, compile_program, mesh_of, run_maker
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.measuring import machine_name, measure_devices
from autopar.runtime.ray.beacon import Beacon
from autopar.runtime.ray.machine import machine
from autopar.runtime.ray.messages import (
    Connect,
    DeviceFacts,
    Failure,
    FileResult,
    Handshake,
    Load,
    Measure,
    Measured,
    ReadRequest,
    Snapshot,
    Start,
    Step,
    StepResult,
    Timed,
    TransferRequest,
    TransferResult,
    WorkerInfo,
    decode,
    encode,
)
from autopar.runtime.shards import DamageError, Leaf, read_boxes, write_shards
from autopar.runtime.transport import Link, PeerLostError, SilentPeerError, SocketLink
from autopar.runtime.transport.direct import Transfers
from autopar.runtime.transport.exchange import Exchange
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from autopar.runtime.transport.shards import ShardLayout
from autopar.runtime.transport.tiles import (
    Tiled,
    device_boxes,
    host_copy,
    moved,
    on_host,
    placed,
    tiled_host,
    tiled_part,
    tiles_of,
)
from autopar.schedule import Apply, Buffer, Instruction, Recv, Run, Work

#: Numbers of microbatches are tags of the schedule; moves between steps are tagged from here on.
_MOVES = 1 << 30


class WorkerHost:
    """A process of a worker: its devices, programs, connections, and the arrays that it keeps between steps.

    Several processes of one worker are a process group of `jax.distributed`: they run the same programs on one mesh, and each
    holds the parts of arrays that are on its devices.

    Args:
        handshake: a `Handshake`, encoded.
    """

    def __init__(self, handshake: bytes) -> None:
        told = decode(handshake, Handshake)
        self._told = told
        self._link = SocketLink(told.process, told.secret, told.listen)
        self._beacon = Beacon(told.monitor, told.secret, told.process)
        self._port = _kept_port(told.listen) if told.group_size > 1 and told.rank == 0 else None
        self._arrays: dict[int, Any] = {}
        self._programs: dict[Work, Ready] = {}
        self._placements: dict[str, NamedSharding] = {}
        self._instructions: tuple[Instruction, ...] = ()
        self._slow: tuple[bool, ...] = ()
        self._held: dict[int, dict[str, Any]] = {}
        self._worker = told.process
        self._peers: Link = self._link

    def info(self) -> bytes:
        """Where this process is: a `WorkerInfo`."""
        at = "" if self._port is None else "{}:{}".format(*self._port.getsockname()[:2])
        return encode(WorkerInfo(self._link.address, os.getpid(), machine(), at))

    def join(self, coordinator: str, limit_s: float) -> None:
        """Makes one `jax.distributed` group of the processes of this worker; returns when all are there.

        Args:
            coordinator: host and port that the first of them keeps; empty where there is but one.
            limit_s: seconds that it may take.
        """
        if not coordinator:
            return
        jax.distributed.initialize(
            coordinator,
            self._told.group_size,
            self._told.rank,
            coordinator_bind_address=coordinator if self._told.rank == 0 else None,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(limit_s)),
        )

    def load(self, message: bytes) -> None:
        """Compiles the programs of a `Load` and connects to the processes that this one sends to."""
        told = decode(message, Load)
        groups = ProcessGroups(told.groups)
        with jax.enable_x64(self._told.x64):
            self._programs, self._placements = load_programs(told.programs, self._devices())
        self._instructions = told.instructions
        self._slow = tuple(isinstance(i, Run | Apply | Recv) for i in told.instructions)
        self._worker = groups.workers[self._told.process]
        self._prepare(told.direct, groups, told.layouts)
        targets = sorted({p for i in told.instructions if hasattr(i, "to") for p in groups.members(i.to)})
        self._link.connect(told.addresses, tuple(targets))

    def step(self, message: bytes, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        """Runs a step.

        Args:
            message: a `Step`.
            given: arrays on the host, by number, that the driver sends along.

        Returns a `StepResult`, and the small results by number.
        """
        told = decode(message, Step)
        with jax.enable_x64(self._told.x64):
            return self._step(told, given)

    def _step(self, told: Step, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        for id in told.forget:
            self._arrays.pop(id, None)
        self._link.until(told.deadline_s)
        at, times = [-1], []
        began = [0.0]

        def before(index: int) -> None:
            at[0] = index
            if self._slow[index]:
                self._beacon.report(told.number, index)
            if told.timed:
                began[0] = time.monotonic()

        def after(index: int, made: tuple[Any, ...]) -> None:
            jax.block_until_ready(made)
            times.append(Timed(index, began[0], time.monotonic()))

        try:
            self._beacon.report(told.number, -1)
            self._move(told)
            worker = Worker(self._programs, self._placements, self._peers, self._start(told.starts, given))
            worker.run(self._instructions, before, after if told.timed else None)
            kept = {id: worker.read(buffer) for id, buffer in told.results}
            jax.block_until_ready(list(kept.values()))
        except Exception as error:
            return encode(StepResult(self._failure(at[0], error))), {}
        self._arrays.update(kept)
        self._beacon.report(told.number, len(self._instructions))
        small = {id: host_copy(a) for id, a in kept.items() if a.size <= told.tell_size and _whole(a)}
        return encode(StepResult(None, tuple(times))), small

    def _failure(self, index: int, error: Exception) -> Failure:
        match error:
            case PeerLostError():
                return Failure(index, "broken", error.peer, str(error))
            case SilentPeerError():
                return Failure(index, "silent", error.peer, str(error))
            case _:
                kind: Literal["broken", "error"] = (
                    "broken" if self._told.group_size > 1 and _of_peers(error) else "error"
                )
                return Failure(index, kind, -1, f"{type(error).__name__}: {error}")

    def put(self, arrays: Mapping[int, Any], values: Mapping[int, str]) -> None:
        """Keeps arrays from the host.

        Args:
            arrays: by number; key data where it is of keys.
            values: name of the value that each is going to be; it is laid out as the programs take that.
        """
        with jax.enable_x64(self._told.x64):
            for id, array in arrays.items():
                self._arrays[id] = self._placed(values[id], tiled_host(array))

    def make(self, code: bytes, arguments: Sequence[Any], ids: Sequence[int], values: Sequence[str]) -> None:
        """Keeps arrays that an exported function makes.

        Args:
            code: the function.
            arguments: its arguments, on the host.
            ids: numbers of its results.
            values: name of the value that each is going to be.
        """
        if not ids:
            return
        with jax.enable_x64(self._told.x64):
            shardings = [self._placements[v] for v in values]
            whole = NamedSharding(shardings[0].mesh, PartitionSpec())
            made = run_maker(code, [placed(tiled_host(a), whole) for a in arguments], shardings)
        self._arrays.update(zip(ids, made, strict=True))

    def get(self, ids: Sequence[int]) -> dict[int, Tiled]:
        """Pieces of arrays that this process has and no other of its worker gives, on the host, by number."""
        return {id: tiles_of(self._arrays[id]) for id in ids}

    def hold(self, message: bytes) -> None:
        """Keeps the arrays of a `Snapshot` for `write`."""
        told = decode(message, Snapshot)
        self._held[told.ticket] = {name: self._arrays[id] for id, name in told.names.items()}

    def write(self, ticket: int, path: str) -> bytes:
        """Writes what this process has of the arrays that are held; a step may run meanwhile.

        Args:
            ticket: of the `Snapshot`.
            path: the file.

        Returns a `FileResult`.
        """
        held = self._held.pop(ticket)
        if not held:
            return encode(FileResult())
        try:
            return encode(FileResult(write_shards(Path(path), ((n, tiles_of(a)) for n, a in sorted(held.items())))))
        except OSError as error:
            return encode(FileResult(file=path, error=str(error)))

    def read(self, message: bytes) -> bytes:
        """Keeps the arrays of a `ReadRequest`: of each what lies on the devices of this process. Returns a `FileResult`."""
        told = decode(message, ReadRequest)
        try:
            with jax.enable_x64(self._told.x64):
                for id, leaf in told.leaves.items():
                    self._arrays[id] = _read_leaf(Path(told.folder), leaf, self._placements.get(told.values[id]))
        except DamageError as error:
            return encode(FileResult(file=error.file, error=str(error)))
        return encode(FileResult())

    def compiled(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program."""
        return {str(w): _described(p.function) for w, p in sorted(self._programs.items())}

    def forget(self, ids: Sequence[int]) -> int:
        """Drops arrays; returns how many are left."""
        for id in ids:
            self._arrays.pop(id, None)
        return len(self._arrays)

    # -- measuring: processes without a pipeline -------------------------------------------------

    def facts(self) -> bytes:
        """What the devices are: a `DeviceFacts`."""
        devices = self._devices()
        memory = None if devices[0].platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit")
        name, versions = machine_name(devices[0]), f"jax {jax.__version__}"
        return encode(DeviceFacts(devices[0].platform, devices[0].device_kind, len(devices), memory, name, versions))

    def measure(self, message: bytes) -> bytes:
        """Measures the devices if a `Measure` says so; returns a `Measured`."""
        told = decode(message, Measure)
        chosen = self._told.process in told.processes
        return encode(Measured(measure_devices(self._devices(), told.effort) if chosen else ()))

    def connect(self, message: bytes) -> tuple[bytes]:
        """Connects to the processes of a `Connect`. Returns a `StepResult`."""
        told = decode(message, Connect)
        try:
            self._prepare(told.direct, ProcessGroups((1,) * len(told.addresses)), {})
            self._link.connect(told.addresses, tuple(p for p in told.addresses if p != self._told.process))
        except Exception as error:
            return (encode(StepResult(self._failure(-1, error))),)
        return (encode(StepResult(None)),)

    def exchange(self, message: bytes) -> tuple[bytes, bytes]:
        """Takes part in an `TransferRequest`. Returns a `StepResult` and an `TransferResult`."""
        told = decode(message, TransferRequest)
        self._link.until(told.deadline_s)
        part = Exchange(self._told.process, self._peers, self._devices())
        try:
            seconds, equal = part.run(told.how, told.workers, told.sizes, told.lanes, told.count)
        except Exception as error:
            return encode(StepResult(self._failure(-1, error))), encode(TransferResult())
        return encode(StepResult(None)), encode(TransferResult(seconds, equal))

    def _prepare(self, direct: bool, groups: ProcessGroups, layouts: Mapping[int, Mapping[str, ShardLayout]]) -> None:
        """Prepares the connections as arrays are to go over them."""
        if direct and self._link.transfers is None:
            self._link.transfers = Transfers(self._link.address[0])
        self._peers = GroupLink(self._link, groups, layouts)

    def _devices(self) -> list[jax.Device]:
        first, count = self._told.first_device, self._told.devices
        return jax.devices()[first : first + count] if count else jax.devices()

    def close(self) -> None:
        """Ends the connections."""
        self._link.close()
        self._beacon.close()

    # -- before the first instruction ----------------------------------------------------------

    def _move(self, told: Step) -> None:
        for move in told.moves:
            if move.source == self._worker:
                self._peers.send(move.target, _MOVES + move.id, self._arrays[move.id], move.value)
        for move in told.moves:
            if move.target == self._worker:
                wanted = self._placements.get(move.value)
                self._arrays[move.id] = self._peers.receive(move.source, _MOVES + move.id, wanted)

    def _start(self, starts: Sequence[Start], given: Mapping[int, Any]) -> dict[Buffer, Any]:
        found: dict[Buffer, Any] = {}
        for s in starts:
            array = tiled_host(given[s.id]) if s.id in given else self._arrays[s.id]
            if not s.microbatches:
                found[Buffer(s.value)] = self._placed(s.value, array)
                continue
            size = array.shape[s.dim] // s.count
            for k in s.microbatches:
                index = (slice(None),) * s.dim + (slice(k * size, (k + 1) * size),)
                part = tiled_part(array, index) if isinstance(array, Tiled) else array[index]
                found[Buffer(s.value, k)] = self._placed(s.value, part)
        return found

    def _placed(self, value: str, array: Any) -> Any:
        wanted = self._placements.get(value)
        if isinstance(array, Tiled):
            # A copy: the array may lie in memory that others reuse.
            own = tiled_host(on_host(array))
            return own.array() if wanted is None else placed(own, wanted)
        lies = getattr(array, "sharding", None)
        return array if wanted is None or lies == wanted else moved(array, wanted)


def _read_leaf(folder: Path, leaf: Leaf, sharding: NamedSharding | None) -> Any:
    if sharding is None:
        return read_boxes(folder, leaf, [tuple((0, n) for n in leaf.shape)]).array()
    boxes = dict.fromkeys(device_boxes(sharding, leaf.shape).values())
    return placed(read_boxes(folder, leaf, list(boxes)), sharding)


def _kept_port(listen: str) -> socket.socket:
    """A free port that stays this process's own; who else of it binds it with SO_REUSEPORT, as gRPC does, may."""
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind((listen, 0))
    return kept


def _whole(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def _of_peers(error: Exception) -> bool:
    """Whether a collective failed, which happens where another process of the group ended."""
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "coordination service", "connection reset", "peer"))


def _described(compiled: Any) -> tuple[str, dict[str, int]]:
    memory = compiled.memory_analysis()
    names = (n for n in dir(memory) if n.endswith("_size_in_bytes"))
    return str(compiled.as_text()), {n: int(getattr(memory, n)) for n in names}


def configure(handshake: bytes) -> None:
    """Settings of jax for the process of one worker."""
    told = decode(handshake, Handshake)
    jax.config.update("jax_enable_x64", told.x64)
    if told.group_size > 1:
        use_gloo(told.listen)
    if told.cache:
        jax.config.update("jax_compilation_cache_dir", told.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def load_programs(
    programs: Sequence[ExportedProgram], devices: Sequence[Any]
) -> tuple[dict[Work, Ready], dict[str, NamedSharding]]:
    """Programs compiled for devices.

    Args:
        programs: of one worker.
        devices: all that it has.

    Returns the programs by work, and how values lie that they read, or else make, by name.
    """
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
    ready: dict[Work, Ready] = {}
    reads: dict[str, NamedSharding] = {}
    makes: dict[str, NamedSharding] = {}
    for p in programs:
        mesh = meshes.setdefault(p.axes, mesh_of(p.axes, devices))
        shardings = tuple(r.sharding(mesh) for r in p.reads)
        ready[p.work] = Ready(tuple(r.name for r in p.reads), shardings, compile_program(p, mesh))
        for port, sharding in zip(p.reads, shardings, strict=True):
            reads.setdefault(port.name, sharding)
        for port in p.results:
            makes.setdefault(port.name, port.sharding(mesh))
    return ready, {**makes, **reads}
