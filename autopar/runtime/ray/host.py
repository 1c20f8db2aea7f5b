"""`WorkerHost`: what runs in a worker's process. Knows neither Ray nor who calls it.

`Measurer` is what such a process measures, without a pipeline: its devices, and links to others.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from autopar._compat.devices import machine_name
from autopar._compat.files import file_hashes, private_folder
from autopar._compat.world import use_gloo
from autopar.runtime.measuring import measure_devices
from autopar.runtime.ray.arrays import ArrayStore
from autopar.runtime.ray.beacon import Beacon
from autopar.runtime.ray.connections import serve_steps
from autopar.runtime.ray.exchanges import exchanges_of
from autopar.runtime.ray.loaded import LoadedFunction, load_programs
from autopar.runtime.ray.machine import EXIT_STATUS, GRACE_S, machine
from autopar.runtime.ray.messages import (
    Connect,
    DeviceFacts,
    Failure,
    Handshake,
    Load,
    Measure,
    MeasureResult,
    StepRequest,
    StepResult,
    Timed,
    TransferRequest,
    TransferResult,
    WorkerInfo,
    decode,
    encode,
)
from autopar.runtime.ray.tls import Identity, credentials_of
from autopar.runtime.transport import PeerLostError, SilentPeerError, SocketLink, WorkerLink
from autopar.runtime.transport.direct import Transfers
from autopar.runtime.transport.exchange import TimedExchange
from autopar.runtime.transport.permutes import MovePrograms
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from autopar.runtime.transport.tiles import host_copy
from autopar.runtime.transport.world import WorldLink

#: Numbers of microbatches are tags of the schedule; moves between steps are tagged from here on.
_MOVES = 1 << 30
#: Seconds until a thread that sends or receives gets its turn while another one works.
_SWITCH_S = 0.0005
#: What jax calls files of compiled programs.
_PROGRAM = "-cache"


class WorkerHost:
    """A process of a worker: its devices, functions, connections, and the arrays that it keeps between steps.

    Several processes of one worker are a group of `jax.distributed`: they run the same programs on one mesh, and each
    holds the parts of arrays that are on its devices. With `RunOptions.world` all workers' processes are one group.

    Args:
        handshake: a `Handshake`, encoded.
    """

    def __init__(self, handshake: bytes) -> None:
        self._handshake = decode(handshake, Handshake)
        given = self._handshake
        credentials = credentials_of(given.secret, None if given.identity is None else Identity(*given.identity))
        self._credentials = credentials
        self._link = SocketLink(given.process, credentials, given.listen)
        self._beacon = Beacon(given.monitor, credentials, given.process, board=given.board)
        self._port = _kept_port(given.listen) if given.group_size > 1 and given.rank == 0 else None
        self._functions: dict[int, LoadedFunction] = {}
        self._worker = given.process
        self._groups = ProcessGroups((1,) * max(given.process + 1, given.group_size))
        self._one_step = threading.Condition()
        self._last_step = -1
        arrays = self._arrays = ArrayStore(self._functions)
        measurer = Measurer(given.process, self._link, self._devices_of, self._devices, self._failure)
        self._methods: Mapping[str, Callable[..., Any]] = {
            "info": self.info, "join": self.join, "serve": self.serve, "load": self.load,
            "unload": self.unload, "step": self.step,
            "abort": self._link.abort, "settle": self.settle, "compiled": self.compiled,
            "put": arrays.put, "make": arrays.make, "get": arrays.get, "forget": arrays.forget,
            "hold": arrays.hold, "write": arrays.write, "read": arrays.read,
            "facts": measurer.facts, "measure": measurer.measure, "connect": measurer.connect,
            "exchange": measurer.exchange,
        }  # fmt: skip

    def call(self, method: str, *args: Any) -> Any:
        """Calls what a driver may call."""
        return self._methods[method](*args)

    def info(self) -> bytes:
        """Place of this process: a `WorkerInfo`."""
        at = "" if self._port is None else "{}:{}".format(*self._port.getsockname()[:2])
        return encode(WorkerInfo(self._link.address, os.getpid(), machine(), at))

    def join(self, coordinator: str, limit_s: float) -> None:
        """Makes one `jax.distributed` group of this and other processes; returns when all are there.

        Args:
            coordinator: host and port that the first of them keeps; empty where there is but one.
            limit_s: seconds that it may take.
        """
        if not coordinator:
            return
        jax.distributed.initialize(
            coordinator,
            self._handshake.group_size,
            self._handshake.rank,
            coordinator_bind_address=coordinator if self._handshake.rank == 0 else None,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(limit_s)),
        )

    def serve(self, host: str, port: int) -> None:
        """Takes steps over a connection to the driver too, which is here."""
        serve_steps((host, port), self._credentials, self._handshake.process, self.step)

    def load(self, message: bytes) -> dict[str, str]:
        """Compiles the programs of a `Load` and connects to the processes that this one sends to.

        Returns hashes of the compiled programs that are kept in files.
        """
        request = decode(message, Load)
        groups = self._groups = ProcessGroups(request.groups)
        worker = self._worker = groups.workers[self._handshake.process]
        with jax.enable_x64(request.x64):
            programs, placements = load_programs(request.programs, self._devices())
        if request.direct and self._link.transfers is None:
            self._link.transfers = Transfers(self._link.address[0])
        link: WorkerLink = GroupLink(self._link, groups, request.layouts)
        if request.exchanges is not None:
            moves = MovePrograms()
            with jax.enable_x64(request.x64):
                exchanges = exchanges_of(request.exchanges, worker, self._devices_of, moves)
            link = WorldLink(GroupLink(self._link, groups, {}), worker, self._devices_of, exchanges, moves)
        self._functions[request.function] = LoadedFunction(
            programs,
            placements,
            request.instructions,
            link,
            request.x64,
            None if request.amp is None else (request.amp, self._worker),
        )
        targets = sorted({p for i in request.instructions if hasattr(i, "to") for p in groups.members(i.to)})
        self._link.connect(request.addresses, tuple(targets))
        kept = self._handshake.programs is not None
        return file_hashes(private_folder(self._handshake.cache), _PROGRAM) if kept else {}

    def unload(self, functions: list[int]) -> None:
        """Frees the programs of functions."""
        for number in functions:
            self._functions.pop(number, None)

    def compiled(self, function: int) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program of a function."""
        return self._functions[function].described()

    def step(self, message: bytes, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        """Runs a step.

        Args:
            message: a `StepRequest`.
            given: arrays on the host, by number, that the driver sends along.

        Returns a `StepResult`, and the small results by number.
        """
        request = decode(message, StepRequest)
        loaded = self._functions[request.function]
        with self._one_step, jax.enable_x64(loaded.x64):
            try:
                return self._step(request, loaded, given)
            finally:
                self._last_step = max(self._last_step, request.number)
                self._one_step.notify_all()

    def settle(self, step: int, limit_s: float) -> bool:
        """Waits for the end of a step, by an error too. Returns whether it ended in time.

        Args:
            step: number of the step.
            limit_s: most seconds to wait.
        """
        with self._one_step:
            return self._one_step.wait_for(lambda: self._last_step >= step, limit_s)

    def _step(
        self, request: StepRequest, loaded: LoadedFunction, given: Mapping[int, Any]
    ) -> tuple[bytes, dict[int, Any]]:
        self._arrays.forget(request.forget)
        self._link.begin(request.deadline_s, request.number)
        at, times = [-1], []
        began, queued = [0.0], [0]
        sent_bytes = self._link.sent_bytes + loaded.link.moved_bytes

        def before(index: int) -> None:
            at[0] = index
            queued[0] = max(queued[0], self._link.queued)
            if loaded.is_slow(index):
                self._beacon.report(request.number, index)
            if request.timed:
                began[0] = time.monotonic()

        def after(index: int, outputs: tuple[Any, ...]) -> None:
            jax.block_until_ready(outputs)
            times.append(Timed(index, began[0], time.monotonic()))

        try:
            self._beacon.report(request.number, -1)
            self._move(request, loaded)
            start = self._arrays.start(loaded, request.starts, given)
            worker, order = loaded.run(start, before, after if request.timed else None, request.order)
            kept = {id: worker.read(buffer) for id, buffer in request.results}
            self._link.finish([a for a in kept.values() if isinstance(a, jax.Array)])
        except Exception as error:
            return encode(StepResult(self._failure(at[0], error))), {}
        self._arrays.update(kept)
        self._beacon.report(request.number, len(loaded.instructions))
        small = {id: host_copy(a) for id, a in kept.items() if a.size <= request.tell_size and _whole(a)}
        sent_bytes = self._link.sent_bytes + loaded.link.moved_bytes - sent_bytes
        return encode(StepResult(None, tuple(times), sent_bytes, queued[0], order)), small

    def _move(self, request: StepRequest, loaded: LoadedFunction) -> None:
        """Before the first instruction: arrays go to workers that need them too, in one order on all workers."""
        for move in request.moves:
            if move.source == self._worker:
                loaded.link.send(move.target, _MOVES + move.id, self._arrays[move.id], move.value)
            elif move.target == self._worker:
                wanted = loaded.placements.get(move.value)
                self._arrays.update({move.id: loaded.link.receive(move.source, _MOVES + move.id, wanted)})

    def _failure(self, index: int, error: Exception) -> Failure:
        match error:
            case PeerLostError():
                return Failure(index, "broken", error.peer, str(error))
            case SilentPeerError():
                return Failure(index, "silent", error.peer, str(error))
            case _:
                # Whether a collective failed since another process of the group ended, the driver knows.
                several = self._handshake.group_size > 1 and isinstance(error, jax.errors.JaxRuntimeError)
                kind: Literal["collective", "error"] = "collective" if several else "error"
                return Failure(index, kind, -1, f"{type(error).__name__}: {error}")

    def _devices(self) -> list[jax.Device]:
        """Devices of this worker."""
        first, count = self._handshake.first_device, self._handshake.devices
        return jax.devices()[first : first + count] if count else self._devices_of(self._worker)

    def _devices_of(self, worker: int) -> list[jax.Device]:
        """Devices of a worker whose processes are joined with this one."""
        first = self._handshake.process - self._handshake.rank
        ranks = [p - first for p in self._groups.members(worker)]
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        return [d for d in devices if d.process_index in ranks]

    def end_soon(self) -> None:
        """Tells the driver that this process is to end, and ends it when the driver is done with it."""
        self._beacon.report_ending()
        self._beacon.wait(GRACE_S)
        os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Ends the connections."""
        self._link.close()
        self._beacon.close()


def _kept_port(listen: str) -> socket.socket:
    """A free port that stays this process's own; who else of it binds it with SO_REUSEPORT, as gRPC does, may."""
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind((listen, 0))
    return kept


def _whole(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def configure(handshake: bytes) -> None:
    """Settings of jax for the process of one worker."""
    decoded = decode(handshake, Handshake)
    sys.setswitchinterval(_SWITCH_S)
    if decoded.group_size > 1:
        use_gloo(decoded.listen)
    if decoded.cache:
        folder = private_folder(decoded.cache)
        if decoded.programs is not None:
            for name, digest in file_hashes(folder, _PROGRAM).items():
                if decoded.programs.get(name) != digest:
                    (folder / name).unlink(missing_ok=True)
        jax.config.update("jax_compilation_cache_dir", decoded.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Measurer:
    """Measurements of one process.

    Args:
        process: its number.
        link: its connections.
        devices_of: number of another process of its world -> the devices there.
        devices: its devices, which are looked for when they are first asked for.
        failure: what an error is told as.
    """

    def __init__(
        self,
        process: int,
        link: SocketLink,
        devices_of: Callable[[int], list[jax.Device]],
        devices: Callable[[], list[jax.Device]],
        failure: Callable[[int, Exception], Failure],
    ) -> None:
        self._process = process
        self._link = link
        self._group_link: WorkerLink | None = None
        self._devices_of = devices_of
        self._devices = devices
        self._failure = failure

    def facts(self) -> bytes:
        """The devices, as `DeviceFacts`."""
        devices = self._devices()
        memory = None if devices[0].platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit")
        name, versions = machine_name(devices[0].platform, devices[0].device_kind), f"jax {jax.__version__}"
        return encode(DeviceFacts(devices[0].platform, devices[0].device_kind, len(devices), memory, name, versions))

    def measure(self, message: bytes) -> bytes:
        """Measures the devices if a `Measure` says so; returns a `MeasureResult`."""
        request = decode(message, Measure)
        measures_here = self._process in request.processes
        return encode(MeasureResult(measure_devices(self._devices(), request.effort) if measures_here else ()))

    def connect(self, message: bytes) -> tuple[bytes]:
        """Connects to the processes of a `Connect`. Returns a `StepResult`."""
        request = decode(message, Connect)
        try:
            if request.direct and self._link.transfers is None:
                self._link.transfers = Transfers(self._link.address[0])
            sockets = GroupLink(self._link, ProcessGroups((1,) * len(request.addresses)), {})
            self._group_link = sockets
            if request.world:
                self._group_link = WorldLink(sockets, self._process, self._devices_of, {}, MovePrograms())
            self._link.connect(request.addresses, tuple(p for p in request.addresses if p != self._process))
        except Exception as error:
            return (encode(StepResult(self._failure(-1, error))),)
        return (encode(StepResult(None)),)

    def exchange(self, message: bytes) -> tuple[bytes, bytes]:
        """Takes part in a `TransferRequest`. Returns a `StepResult` and a `TransferResult`."""
        request = decode(message, TransferRequest)
        self._link.begin(request.deadline_s)
        part = TimedExchange(self._process, self._group_link or self._link, self._devices())
        try:
            seconds, equal = part.run(request.how, request.workers, request.sizes, request.lanes, request.count)
        except Exception as error:
            return encode(StepResult(self._failure(-1, error))), encode(TransferResult())
        return encode(StepResult(None)), encode(TransferResult(seconds, equal))
