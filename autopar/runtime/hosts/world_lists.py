"""A pipeline in processes that run one script: each carries out the lists of the workers whose devices it has.

`autopar.runtime.hosts.lists_load.load_lists` makes a `WorldLists`. State lies on its stage's devices, a microbatch on
the worker that runs it. Values between workers of different processes are moved by programs that both start, in one
order (`autopar.schedule.order`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from autopar._compat.dtypes import dtype_name, jax_dtype
from autopar.errors import AutoparError
from autopar.lower.pipeline.stage_program import Port
from autopar.runtime.hosts.announced import Announcement
from autopar.runtime.hosts.arrays import copied, empty, is_global, own, spread
from autopar.runtime.hosts.step_lists import ArrayPlace, ListMaker, StepLists, input_buffer
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, check_donated, give_up
from autopar.runtime.local_pipeline import LoadedPipeline, LoadedTexts
from autopar.runtime.pipeline import Loaded, clocked
from autopar.runtime.transport.permutes import ArrayMove, InFlight, PermuteLinks
from autopar.schedule import Buffer, Task, Work
from autopar.schedule.memory import WorkerMemory


@dataclass(frozen=True, eq=False)
class WorldLists(LoadedPipeline):
    """A pipeline of several processes, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        loaded: programs of this process's workers by (worker, work).
        ports: how the programs of all workers take a value, by (worker, value).
        origins: by input of the lowered step where it lies when a step begins.
        ends: likewise by output when it ends.
        prepare: makes the lists of a step of whose batch these inputs lie on their first stage, rather than whole on
            every process.
        maker: of lists.
        announcement: of small results that are no state.
        process: number of this one.
        worker_memory: bytes a device of each worker when its list of instructions needs the most.
    """

    loaded: Mapping[tuple[int, Work], Loaded]
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]]
    origins: tuple[ArrayPlace, ...]
    ends: tuple[ArrayPlace, ...]
    prepare: Callable[[frozenset[str]], StepLists]
    maker: ListMaker
    announcement: Announcement
    process: int
    worker_memory: tuple[WorkerMemory, ...]

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the worker which needs most needs when it needs the most."""
        return max((m.total for m in self.worker_memory), default=0)

    @property
    def executable(self) -> LoadedTexts:
        """Texts and memory of the programs of this process."""
        return LoadedTexts(self.loaded)

    def timed(self, note: Callable[[Work, float], None]) -> WorldLists:
        """This pipeline, which tells ``note`` the seconds of this process's programs."""
        return dataclasses.replace(self, loaded={k: clocked(v, note) for k, v in self.loaded.items()})

    # -- arguments -----------------------------------------------------------------------------

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call: state on its stage; a batch that every process has whole stays as it is.

        Raises:
            AutoparError: a leaf was donated to an earlier call, or has no data.
        """
        return [self._place(n, leaf, n in self._batch) for n, leaf in enumerate(leaves)]

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call where the program wants them."""
        return [self._place(n, leaf, False) for n, leaf in enumerate(leaves)]

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` where the step's ``inputs`` lie."""
        return [self._place(n, a, False) for n, a in zip(inputs, function(*arguments), strict=True)]

    @cached_property
    def _batch(self) -> frozenset[int]:
        """Indices of the inputs that microbatches are cut from."""
        values = self.lowered.instructions.dataflow.values
        named = {v.ref.name for v in values if v.ref is not None and v.ref.kind == "batch" and v.is_input}
        inputs = self.split_step.step.graph.inputs
        return frozenset(n for n, at in enumerate(self.split_step.inputs) if any(inputs[i].name in named for i in at))

    def _place(self, index: int, leaf: Any, batch: bool) -> Any:
        check_data(leaf, self.names[index])
        if index in self.unread:
            return leaf
        wanted = self.program.input_shardings[index]
        if isinstance(leaf, jax.Array):
            if leaf.sharding == wanted:
                return leaf
            if is_global(leaf):
                return self._from_elsewhere(index, leaf)
            if not batch and wanted.is_fully_addressable:
                moved = jax.device_put(leaf, wanted)
                return copied(moved) if index in self.donated else moved
        if batch:
            return leaf if isinstance(leaf, jax.Array) else own(leaf, self.entries[index][1])
        return spread(leaf, self.entries[index][1], wanted)

    def _from_elsewhere(self, index: int, leaf: Any) -> Any:
        """An array on devices of several processes where its first stage wants it: it was made for another plan."""
        wanted = self.program.input_shardings[index]
        if not isinstance(leaf.sharding, NamedSharding):
            raise AutoparError(
                f"{self.names[index]} lies on devices of several processes by {type(leaf.sharding).__name__}",
                remedy="place it by a NamedSharding, or call step.shard",
            )
        program = self.maker.programs.program([ArrayMove(leaf.shape, dtype_name(leaf.dtype), leaf.sharding, wanted)])
        arrays = program([leaf] if leaf.sharding.addressable_devices else None) if program.is_here else None
        return empty(leaf.shape, wanted, leaf.dtype) if arrays is None else arrays[0]

    # -- a step --------------------------------------------------------------------------------

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """
        with LAUNCHES.of(self):
            check_donated(leaves, self.names, self.donated)
            inputs = self.by_name(self.without_aliases([*placed, *self.constants]))
            here = self.placed_batch(inputs)
            step = self.prepare(frozenset(here))
            workers = self.carry_out(step, self._start(inputs, here))
            outputs = {n: self.output(workers, n, end) for n, end in enumerate(self.ends)}
            shared = self.announcement.tell(outputs)
            give_up(leaves, self.donated)
            give_up(placed, self.donated)
            joined = self.joined({**outputs, **shared})
            LAUNCHES.launched([a for a in joined if a.sharding.addressable_devices])
            return joined

    def carry_out(self, step: StepLists, start: dict[tuple[int, Buffer], Any]) -> dict[int, Worker]:
        """This process's part of some lists; returns its workers as they are then.

        Args:
            step: the lists, and the order in which they are carried out.
            start: by (worker, buffer) the arrays on this process's workers; taken from there.
        """
        in_flight = InFlight(self.announcement.mesh)
        links = PermuteLinks(step.exchanges, in_flight)
        workers = {}
        for worker in self.workers_here:
            buffers = {b: array for (w, b), array in start.items() if w == worker}
            workers[worker] = Worker(self._programs[worker], self.placements[worker], links.link(worker), buffers)
        start.clear()  # what a worker frees is gone
        step.carry_out(self.process, workers, self._over_processes, in_flight)
        return workers

    @cached_property
    def _over_processes(self) -> frozenset[int]:
        """Workers with devices of several processes."""
        spread_out = {w for (w, _), p in self.loaded.items() if p.mesh.is_multi_process}
        return frozenset(spread_out)

    @cached_property
    def workers_here(self) -> tuple[int, ...]:
        """Workers of which this process has devices."""
        return tuple(sorted({worker for worker, _ in self.loaded}))

    @cached_property
    def _programs(self) -> Mapping[int, Mapping[Work, Ready]]:
        programs: dict[int, dict[Work, Ready]] = {w: {} for w in self.workers_here}
        for (worker, work), loaded in self.loaded.items():
            if loaded.compiled is not None:
                names = tuple(p.name for p in loaded.program.reads)
                programs[worker][work] = Ready(names, loaded.shardings, loaded.compiled)
        return MappingProxyType(programs)

    @cached_property
    def placements(self) -> Mapping[int, Mapping[str, NamedSharding]]:
        """Wanted layouts of values from other workers, by worker and name."""
        placements: dict[int, dict[str, NamedSharding]] = {w: {} for w in self.workers_here}
        for (worker, name), (port, mesh) in self.ports.items():
            placements.setdefault(worker, {})[name] = port.sharding(mesh)
        return MappingProxyType(placements)

    # -- what lies where when a step begins ----------------------------------------------------

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Numbers of the lowered step's inputs."""
        return {i.name: n for n, i in enumerate(self.split_step.step.graph.inputs)}

    @cached_property
    def _microbatched(self) -> tuple[str, ...]:
        """Names of inputs that microbatches are cut from."""
        values = self.lowered.instructions.dataflow.values
        return tuple(
            dict.fromkeys(v.ref.name for v in values if v.is_input and v.ref is not None and v.ref.kind == "batch")
        )

    def placed_batch(self, inputs: Mapping[str, Any]) -> set[str]:
        """Names of the inputs of the batch that are global, on their first stage; processes have the others whole."""
        places = {n: self.origins[self.index[n]].sharding for n in self._microbatched}
        return {n for n, s in places.items() if isinstance(inputs[n], jax.Array) and inputs[n].sharding == s}

    def _start(self, inputs: Mapping[str, Any], placed_batch: set[str]) -> dict[tuple[int, Buffer], Any]:
        """Arrays on this process's workers when a step begins."""
        start: dict[tuple[int, Buffer], Any] = {}
        lies: set[tuple[int, str]] = set()
        for value in self.lowered.instructions.dataflow.values:
            if not value.is_input:
                continue
            assert value.ref is not None, f"{value.name} is of no value of the step"
            name = value.ref.name
            origin, array = self.origins[self.index[name]], inputs[name]
            if value.ref.kind != "in":
                self.put_microbatches(start, value.name, value.stages, name, array, placed_batch)
                continue
            if origin.worker not in self.workers_here:
                continue
            array = self.at_origin(name, array)
            start.setdefault((origin.worker, input_buffer(name)), array)
            if origin.worker in {w for s in value.stages for w in self.lowered.table.workers_of_stage(s)}:
                safe = jnp.copy(array) if value.donated and (origin.worker, name) in lies else array
                start[origin.worker, Buffer(value.name)] = self.put(origin.worker, value.name, safe)
                lies.add((origin.worker, name))
        return start

    def at_origin(self, name: str, array: Any) -> Any:
        """An input of the step where it lies between steps, if this process has some of it."""
        place = self.origins[self.index[name]].sharding
        lies = isinstance(array, jax.Array) and array.sharding == place
        return array if lies else spread(array, array.dtype, place)

    def put_microbatches(
        self,
        start: dict[tuple[int, Buffer], Any],
        value: str,
        stages: Sequence[int],
        name: str,
        array: Any,
        placed_batch: set[str],
    ) -> None:
        """Adds to ``start`` the microbatches of an input of the step on this process's workers.

        Args:
            start: by (worker, buffer) the arrays.
            value: its name in the dataflow.
            stages: that read it.
            name: of the input.
            array: the input: global, or whole on this process.
            placed_batch: names of inputs that are global.
        """
        table, origin = self.lowered.table, self.origins[self.index[name]].worker
        dim, count = self.lowered.map.microbatching.batch[name], self.lowered.table.num_microbatches
        size = array.shape[dim] // count
        for k in range(count):
            if name in placed_batch:
                if origin in self.workers_here:
                    place = self._microbatch_sharding(value, name)
                    start[origin, input_buffer(name, k)] = _sliced(array, k * size, size, dim, place)
                    workers = {table.worker_of(Task("forward", s, k)) for s in stages}
                    if origin in workers:
                        start[origin, Buffer(value, k)] = self.put(origin, value, start[origin, input_buffer(name, k)])
                continue
            for worker in {table.worker_of(Task("forward", s, k)) for s in stages}:
                if worker in self.workers_here:
                    start[worker, Buffer(value, k)] = self._cut(array, k * size, size, dim, worker, value)

    def _microbatch_sharding(self, value: str, name: str) -> NamedSharding:
        """Sharding of a microbatch of a global input."""
        origin = self.origins[self.index[name]]
        known = self.ports.get((origin.worker, value))
        place = origin.microbatch if known is None else known[0].sharding(known[1])
        assert place is not None, f"{name} is no batch where it lies"
        return place

    def _cut(self, array: Any, first: int, size: int, dim: int, worker: int, value: str) -> Any:
        """A microbatch of an array that this process has whole, on a worker."""
        port, mesh = self.ports[worker, value]
        wanted = port.sharding(mesh)
        on_host = isinstance(array, np.ndarray)
        rows = (*(slice(None),) * dim, slice(first, first + size))
        piece: Any = array[rows] if on_host else lax.slice_in_dim(array, first, first + size, axis=dim)
        if wanted.is_fully_addressable:
            return jax.device_put(piece, wanted)
        return spread(piece, piece.dtype, wanted, copy=False)

    def put(self, worker: int, name: str, array: Any) -> Any:
        """``array`` as the programs of a worker of this process take the value of that name."""
        port, mesh = self.ports[worker, name]
        wanted = port.sharding(mesh)
        return array if array.sharding == wanted else jax.device_put(array, wanted)

    # -- results -------------------------------------------------------------------------------

    def output(self, workers: Mapping[int, Worker], number: int, end: ArrayPlace, buffer: Buffer | None = None) -> Any:
        """An output of the lowered step; one without data where this process has none of it."""
        if end.worker not in workers:
            type = self.split_step.step.graph.outputs[number].type
            return empty(type.shape, end.sharding, jax_dtype(type.dtype))
        array = workers[end.worker].arrays[Buffer(end.value) if buffer is None else buffer]
        return array if array.sharding == end.sharding else jax.device_put(array, end.sharding)


def _sliced(array: Any, first: int, size: int, dim: int, wanted: NamedSharding) -> Any:
    """Rows of a global array, laid out on the devices that have it: all their processes call it together."""
    return jax.jit(_rows, static_argnums=(2, 3), out_shardings=wanted)(array, np.int32(first), size, dim)


def _rows(array: Any, first: Any, size: int, dim: int) -> Any:
    return lax.dynamic_slice_in_dim(array, first, size, axis=dim)
