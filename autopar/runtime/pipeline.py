"""Instruction lists interpreted in one process: each stage on its own devices, transfers by `jax.device_put`.

The lists of all workers are walked in turn: each worker goes on until it waits for a value that was not sent yet.
Programs are dispatched asynchronously, so devices of different stages compute at the same time where the platform
allows it (XLA's CPU client does not).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar._compat.dtypes import jax_dtype
from autopar.errors import ScheduleError
from autopar.lower.pipeline.ports import Port
from autopar.lower.pipeline.programs import StageProgram
from autopar.schedule import (
    Accumulate,
    Apply,
    Buffer,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    Work,
)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program on a worker's devices.

    Args:
        program: what it is.
        mesh: the devices.
        compiled: jax's compiled object: (number of the microbatch, arrays) -> tuple of arrays.
        shardings: of the arrays that it takes.
    """

    program: StageProgram
    mesh: Mesh
    compiled: Any
    shardings: tuple[NamedSharding, ...]

    @staticmethod
    def compile(program: StageProgram, mesh: Mesh) -> Loaded:
        """Compiles ``program`` for ``mesh``."""
        shardings = tuple(p.sharding(mesh) for p in program.reads)
        sizes = {str(a): int(n) for a, n in mesh.shape.items()}
        shapes = [
            jax.ShapeDtypeStruct(p.shape(sizes), jax_dtype(p.type.dtype), sharding=s)
            for p, s in zip(program.reads, shardings, strict=True)
        ]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = program.jitted(mesh).lower(number, *shapes).compile() if program.results else None
        return Loaded(program, mesh, compiled, shardings)


@dataclass(frozen=True, eq=False)
class LocalPipeline:
    """A pipeline on the devices of this process.

    Args:
        program: the instruction lists.
        loaded: programs by (worker, work).
    """

    program: Program
    loaded: Mapping[tuple[int, Work], Loaded]

    @cached_property
    def ports(self) -> Mapping[tuple[int, str], tuple[Port, Mesh]]:
        """How the programs of a worker take a value, by (worker, value): those of the first that reads it."""
        found: dict[tuple[int, str], tuple[Port, Mesh]] = {}
        for (worker, _), loaded in sorted(self.loaded.items(), key=lambda e: e[0]):
            for port in loaded.program.reads:
                found.setdefault((worker, port.name), (port, loaded.mesh))
        return found

    def run(
        self, start: Mapping[tuple[int, Buffer], Any], observe: Callable[[int, Store], None] | None = None
    ) -> Store:
        """Runs a step.

        Args:
            start: what lies on each worker when the step begins.
            observe: called after each instruction with its worker and what lies on all workers.

        Returns what lies on each worker when it ends.

        Raises:
            ScheduleError: the lists wait for each other.
        """
        store = Store(self, dict(start))
        lists = [deque(w.instructions) for w in self.program.workers]
        while any(lists):
            moved = False
            for worker, line in enumerate(lists):
                while line and store.ready(worker, line[0]):
                    store.do(worker, line.popleft())
                    moved = True
                    if observe is not None:
                        observe(worker, store)
            if not moved:
                waiting = {w: str(line[0]) for w, line in enumerate(lists) if line}
                raise ScheduleError(f"the instruction lists wait for each other: {waiting}")
        return store


@dataclass
class Store:
    """Arrays by (worker, buffer) during a step."""

    pipeline: LocalPipeline
    arrays: dict[tuple[int, Buffer], Any]
    queues: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)
    rows: dict[tuple[int, Buffer], dict[int, Any]] = field(default_factory=dict)

    def held(self, worker: int) -> list[Buffer]:
        """Buffers on a worker."""
        return [buffer for w, buffer in self.arrays if w == worker]

    def ready(self, worker: int, instruction: Instruction) -> bool:
        """Whether the instruction need not wait: a receiver for its value, a sender until the last one was taken."""
        if isinstance(instruction, Recv):
            return bool(self.queues.get((instruction.source, worker)))
        return not isinstance(instruction, Send) or not self.queues.get((worker, instruction.to))

    def do(self, worker: int, instruction: Instruction) -> None:
        """Carries out one instruction."""
        match instruction:
            case Run(work=work, microbatch=number, reads=reads, writes=writes, donate=donate):
                self._run(worker, work, max(number, 0), reads, writes)
                self._forget(worker, donate)
            case Apply(work=work, reads=reads, writes=writes, donate=donate):
                self._run(worker, work, 0, reads, writes)
                self._forget(worker, donate)
            case Send(value=value, to=to):
                self.queues.setdefault((worker, to), deque()).append(self.read(worker, value))
            case Recv(value=value, source=source):
                array = self.queues[source, worker].popleft()
                self.arrays[worker, value] = self._placed(worker, value.value, array)
            case Accumulate(into=into, value=value, reduce=reduce, first=first, donate=donate):
                self._accumulate(worker, into, value, reduce, first)
                self._forget(worker, (value,) if donate else ())
            case Free(values=values):
                self._forget(worker, values)
            case _:
                raise ScheduleError(f"{type(instruction).__name__} is not carried out by this runtime")

    def _forget(self, worker: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.arrays.pop((worker, buffer), None)
            self.rows.pop((worker, buffer), None)

    def read(self, worker: int, buffer: Buffer) -> Any:
        """The array of a buffer; rows of a concatenated one are stacked in the order of the microbatches."""
        rows = self.rows.get((worker, buffer))
        if rows is not None:
            return jnp.stack([rows[k] for k in sorted(rows)])
        return self.arrays[worker, buffer]

    def _run(self, worker: int, work: Work, number: int, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        loaded = self.pipeline.loaded.get((worker, work))
        if loaded is None or loaded.compiled is None:
            return
        given = []
        by_name = {b.value: b for b in reads}
        for port, wanted in zip(loaded.program.reads, loaded.shardings, strict=True):
            array = self.read(worker, by_name[port.name])
            given.append(array if array.sharding == wanted else jax.device_put(array, wanted))
        made = loaded.compiled(np.int32(number), *given)
        for buffer, array in zip(writes, made, strict=True):
            self.arrays[worker, buffer] = array

    def _placed(self, worker: int, name: str, array: Any) -> Any:
        found = self.pipeline.ports.get((worker, name))
        if found is None:
            return array
        port, mesh = found
        return jax.device_put(array, port.sharding(mesh))

    def _accumulate(self, worker: int, into: Buffer, value: Buffer, reduce: str, first: bool) -> None:
        term = self.arrays[worker, value]
        if reduce == "concatenate":
            self.rows.setdefault((worker, into), {})[value.microbatch] = term
        elif first:
            self.arrays[worker, into] = term
        else:
            total = self.arrays[worker, into]
            join = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[reduce]
            self.arrays[worker, into] = join(total, jax.device_put(term, total.sharding))
