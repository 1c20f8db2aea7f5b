"""Instruction lists interpreted in one process: each stage on its own devices, transfers by `jax.device_put`.

The lists of all workers are walked in turn: each worker goes on until it waits for a value that was not sent yet.
Programs are dispatched asynchronously, so devices of different stages compute at the same time where the platform
allows it (XLA's CPU client does not).
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar._compat.dtypes import jax_dtype
from autopar.errors import ScheduleError
from autopar.lower.pipeline.stage_program import Port, StageProgram, donated
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.launches import runnable
from autopar.runtime.transport import WorkerQueues
from autopar.schedule import Buffer, Program, Work


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program on a worker's devices.

    Args:
        program: what it is.
        mesh: the devices.
        compiled: jax's compiled object: (number of the microbatch, arrays) -> tuple of arrays.
        shardings: of the arrays that it takes.
        donated: names of the values whose buffers it writes results into.
    """

    program: StageProgram
    mesh: Mesh
    compiled: Any
    shardings: tuple[NamedSharding, ...]
    donated: frozenset[str] = frozenset()

    @staticmethod
    def compile(program: StageProgram, mesh: Mesh, given_up: Set[str] = frozenset()) -> Loaded:
        """Compiles ``program`` for ``mesh``.

        Args:
            program: of a stage.
            mesh: the devices.
            given_up: values that are not used again once it has run.
        """
        shardings = tuple(p.sharding(mesh) for p in program.reads)
        compiled, at = None, donated(program, given_up, {str(a): int(n) for a, n in mesh.shape.items()})
        if program.results:
            stage = lowered_stage(program, mesh, at)
            compiled = runnable(stage.function, stage.lowered.compile(), stage.dtypes)
        return Loaded(program, mesh, compiled, shardings, frozenset(program.reads[n].name for n in at))


def clocked(loaded: Loaded, note: Callable[[Work, float], None]) -> Loaded:
    """The program, waited for.

    Args:
        loaded: the program.
        note: called with it and its seconds each time that it ran.
    """

    def call(*arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        outputs = jax.block_until_ready(loaded.compiled(*arguments))
        note(loaded.program.work, time.perf_counter() - start)
        return outputs

    return loaded if loaded.compiled is None else dataclasses.replace(loaded, compiled=call)


@dataclass(frozen=True, eq=False)
class LoweredStage:
    """A program of a stage, lowered by jax.

    Args:
        function: jitted.
        lowered: jax's lowered object.
        dtypes: of the arrays that it takes.
    """

    function: Any
    lowered: Any
    dtypes: tuple[Any, ...]


def lowered_stage(program: StageProgram, mesh: Mesh, at: Sequence[int] = ()) -> LoweredStage:
    """``program`` lowered for ``mesh``.

    Args:
        program: of a stage.
        mesh: the devices.
        at: indices of the arrays whose buffers it writes results into.
    """
    sizes = {str(a): int(n) for a, n in mesh.shape.items()}
    shapes = [
        jax.ShapeDtypeStruct(p.shape(sizes), jax_dtype(p.type.dtype), sharding=p.sharding(mesh)) for p in program.reads
    ]
    function = program.jitted(mesh, at)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return LoweredStage(function, function.lower(number, *shapes), tuple(s.dtype for s in shapes))


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
        """Ports of a worker's programs, by (worker, value): those of the first program that reads it."""
        ports: dict[tuple[int, str], tuple[Port, Mesh]] = {}
        for (worker, _), loaded in sorted(self.loaded.items(), key=lambda e: e[0]):
            for port in loaded.program.reads:
                ports.setdefault((worker, port.name), (port, loaded.mesh))
        return MappingProxyType(ports)

    @cached_property
    def _programs(self) -> tuple[Mapping[Work, Ready], ...]:
        programs: list[dict[Work, Ready]] = [{} for _ in self.program.workers]
        for (worker, work), loaded in self.loaded.items():
            if loaded.compiled is not None:
                names = tuple(p.name for p in loaded.program.reads)
                programs[worker][work] = Ready(names, loaded.shardings, loaded.compiled)
        return tuple(MappingProxyType(f) for f in programs)

    @cached_property
    def _placements(self) -> tuple[Mapping[str, NamedSharding], ...]:
        placements: list[dict[str, NamedSharding]] = [{} for _ in self.program.workers]
        for (worker, name), (port, mesh) in self.ports.items():
            placements[worker][name] = port.sharding(mesh)
        return tuple(MappingProxyType(f) for f in placements)

    def workers(self, start: Mapping[tuple[int, Buffer], Any]) -> list[Worker]:
        """All workers, with what lies on each of them when a step begins."""
        queues, workers = WorkerQueues(), []
        for number, (programs, placements) in enumerate(zip(self._programs, self._placements, strict=True)):
            buffers = {b: array for (w, b), array in start.items() if w == number}
            workers.append(Worker(programs, placements, queues.link(number), buffers))
        return workers

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
        workers = self.workers(start)
        store = Store(tuple(workers))
        lists = [deque(w.instructions) for w in self.program.workers]
        while any(lists):
            moved = False
            for number, (worker, line) in enumerate(zip(workers, lists, strict=True)):
                while line and worker.ready(line[0]):
                    worker.do(line.popleft())
                    moved = True
                    if observe is not None:
                        observe(number, store)
            if not moved:
                blocked = {w: str(line[0]) for w, line in enumerate(lists) if line}
                raise ScheduleError(f"the instruction lists wait for each other: {blocked}")
        for worker in workers:
            worker.finish()
        return store


@dataclass(frozen=True, eq=False)
class Store:
    """Values on the workers.

    Args:
        workers: worker 0, 1, ...
    """

    workers: tuple[Worker, ...]

    @property
    def arrays(self) -> dict[tuple[int, Buffer], Any]:
        """Arrays by (worker, buffer)."""
        return {(number, b): array for number, w in enumerate(self.workers) for b, array in w.arrays.items()}

    def held(self, worker: int) -> list[Buffer]:
        """Buffers on a worker."""
        return list(self.workers[worker].arrays)

    def read(self, worker: int, buffer: Buffer) -> Any:
        """The array of a buffer; rows of a concatenated one are stacked in the order of the microbatches."""
        return self.workers[worker].read(buffer)
