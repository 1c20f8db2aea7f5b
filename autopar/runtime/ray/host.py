"""`WorkerHost`: what runs in a worker's process. Knows neither Ray nor who calls it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.lower.pipeline.exported import ExportedProgram, compile_program, mesh_of, run_maker
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.ray.beacon import Beacon
from autopar.runtime.ray.machine import machine
from autopar.runtime.ray.messages import Done, Failure, Hello, Here, Load, Start, Step, Timed, decode, encode
from autopar.runtime.transport import PeerLostError, SilentPeerError, SocketLink
from autopar.runtime.transport.tiles import from_host, host_copy, placed, tiles_of
from autopar.schedule import Apply, Buffer, Instruction, Recv, Run, Work

#: Numbers of microbatches are tags of the schedule; moves between steps are tagged from here on.
_MOVES = 1 << 30


class WorkerHost:
    """A worker: its devices, programs, connections, and the arrays that it keeps between steps.

    Args:
        hello: a `Hello`, encoded.
    """

    def __init__(self, hello: bytes) -> None:
        told = decode(hello, Hello)
        self._number = told.worker
        devices = jax.devices()
        count = told.devices or len(devices)
        self._devices = devices[told.first_device : told.first_device + count]
        self._x64 = told.x64
        self._link = SocketLink(told.worker, told.secret, told.listen)
        self._beacon = Beacon(told.monitor, told.secret, told.worker)
        self._arrays: dict[int, Any] = {}
        self._programs: dict[Work, Ready] = {}
        self._placements: dict[str, NamedSharding] = {}
        self._instructions: tuple[Instruction, ...] = ()
        self._slow: tuple[bool, ...] = ()

    def here(self) -> bytes:
        """Where this worker is: a `Here`."""
        return encode(Here(self._link.address, len(self._devices), self._devices[0].platform, os.getpid(), machine()))

    def load(self, message: bytes) -> None:
        """Compiles the programs of a `Load` and connects to the workers that this one sends to."""
        told = decode(message, Load)
        with jax.enable_x64(self._x64):
            self._programs, self._placements = load_programs(told.programs, self._devices)
        self._instructions = told.instructions
        self._slow = tuple(isinstance(i, Run | Apply | Recv) for i in told.instructions)
        targets = sorted({i.to for i in told.instructions if hasattr(i, "to")})
        self._link.connect(told.addresses, tuple(targets))

    def step(self, message: bytes, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        """Runs a step.

        Args:
            message: a `Step`.
            given: arrays on the host, by number, that the driver sends along.

        Returns a `Done`, and the small results by number.
        """
        told = decode(message, Step)
        with jax.enable_x64(self._x64):
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
            worker = Worker(self._programs, self._placements, self._link, self._start(told.starts, given))
            worker.run(self._instructions, before, after if told.timed else None)
            kept = {id: worker.read(buffer) for id, buffer in told.results}
            jax.block_until_ready(list(kept.values()))
        except PeerLostError as error:
            return encode(Done(Failure(at[0], "broken", error.peer, str(error)))), {}
        except SilentPeerError as error:
            return encode(Done(Failure(at[0], "silent", error.peer, str(error)))), {}
        except Exception as error:
            return encode(Done(Failure(at[0], "error", -1, f"{type(error).__name__}: {error}"))), {}
        self._arrays.update(kept)
        self._beacon.report(told.number, len(self._instructions))
        small = {id: host_copy(a) for id, a in kept.items() if a.size <= told.tell_size}
        return encode(Done(None, tuple(times))), small

    def put(self, arrays: Mapping[int, Any], values: Mapping[int, str]) -> None:
        """Keeps arrays from the host.

        Args:
            arrays: by number; key data where it is of keys.
            values: name of the value that each is going to be; it is laid out as the programs take that.
        """
        with jax.enable_x64(self._x64):
            for id, array in arrays.items():
                self._arrays[id] = self._placed(values[id], from_host(array))

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
        with jax.enable_x64(self._x64):
            shardings = [self._placements[v] for v in values]
            made = run_maker(code, [from_host(a) for a in arguments], shardings)
        self._arrays.update(zip(ids, made, strict=True))

    def get(self, ids: Sequence[int]) -> dict[int, Any]:
        """Arrays on the host, by number; those of keys as key data."""
        return {id: host_copy(self._arrays[id]) for id in ids}

    def compiled(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program."""
        return {str(w): _described(p.function) for w, p in sorted(self._programs.items())}

    def forget(self, ids: Sequence[int]) -> int:
        """Drops arrays; returns how many are left."""
        for id in ids:
            self._arrays.pop(id, None)
        return len(self._arrays)

    def close(self) -> None:
        """Ends the connections."""
        self._link.close()
        self._beacon.close()

    # -- before the first instruction ----------------------------------------------------------

    def _move(self, told: Step) -> None:
        for move in told.moves:
            if move.source == self._number:
                self._link.send(move.target, _MOVES + move.id, self._arrays[move.id])
        for move in told.moves:
            if move.target == self._number:
                self._arrays[move.id] = self._link.receive(move.source, _MOVES + move.id, None)

    def _start(self, starts: Sequence[Start], given: Mapping[int, Any]) -> dict[Buffer, Any]:
        found: dict[Buffer, Any] = {}
        for s in starts:
            array = from_host(given[s.id]) if s.id in given else self._arrays[s.id]
            if not s.microbatches:
                found[Buffer(s.value)] = self._placed(s.value, array)
                continue
            size = array.shape[s.dim] // s.count
            for k in s.microbatches:
                index = (slice(None),) * s.dim + (slice(k * size, (k + 1) * size),)
                found[Buffer(s.value, k)] = self._placed(s.value, array[index])
        return found

    def _placed(self, value: str, array: Any) -> Any:
        wanted = self._placements.get(value)
        if isinstance(array, jax.Array):
            return array if wanted is None or array.sharding == wanted else jax.device_put(array, wanted)
        # A copy: the array may lie in memory that others reuse.
        host = np.array(array, copy=True, order="C")
        if wanted is None:
            return jnp.asarray(host)
        return placed(tiles_of(host), wanted)


def _described(compiled: Any) -> tuple[str, dict[str, int]]:
    memory = compiled.memory_analysis()
    names = (n for n in dir(memory) if n.endswith("_size_in_bytes"))
    return str(compiled.as_text()), {n: int(getattr(memory, n)) for n in names}


def configure(hello: bytes) -> None:
    """Settings of jax for the process of one worker."""
    told = decode(hello, Hello)
    jax.config.update("jax_enable_x64", told.x64)
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
