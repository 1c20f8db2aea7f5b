"""A pipeline in one process, or in several that run one script: each carries out the lists of the workers that it has.

`load_pipeline` compiles a pipeline and makes a `PipelineProgram`. State lies on its stage's devices, a microbatch on
the worker that runs it. Programs are dispatched in one order (`autopar.schedule.order`), so that devices of different
stages compute at the same time. Values between workers of one process change hands; between processes they are moved
by programs that both start. The lists of a step are made in `autopar.runtime.step_lists`. Pipelines as one XLA program
are `autopar.runtime.hosts.one_program`, pipelines on Ray `autopar.runtime.ray.program`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from autopar._compat.dtypes import dtype_name, jax_dtype
from autopar._compat.world import World, world
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.ir.analysis import unread_inputs
from autopar.lower.hosted import check_host_memory
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.split_layers import SplitStep
from autopar.plan.pipeline import WorkKind
from autopar.runtime.hosts.agree import Agreement, wait_s
from autopar.runtime.hosts.arrays import copied, empty, is_global, own, put, spread
from autopar.runtime.hosts.broadcast import Broadcast, BroadcastResult
from autopar.runtime.hosts.callbacks import check_callbacks
from autopar.runtime.hosts.connections import compile_connected, open_connections
from autopar.runtime.interpreter import Ready, Worker
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, check_donated, give_up
from autopar.runtime.loaded import LoadedStep, StepShardings, described_inputs
from autopar.runtime.stage_programs import Loaded, LoadedTexts, clocked, compiled_stages, worker_meshes
from autopar.runtime.step_lists import ArrayPlace, ListMaker, StepLists, input_buffer, list_maker
from autopar.runtime.step_places import StepPlaces, places_of
from autopar.runtime.transport.base import WorkerLink
from autopar.runtime.transport.permutes import ArrayMove, InFlight, PermuteLinks
from autopar.schedule import Buffer, Task, ValueSpec, Work
from autopar.schedule.memory import WorkerMemory, worker_memory

#: Bytes of a result that is no state up to which every process gets it.
SMALL_BYTES = 1 << 16

#: (kind, stage, part, bytes of temporaries) of stage programs.
_Temporaries: TypeAlias = list[tuple[WorkKind, int, int, int]]


@dataclass(frozen=True, eq=False)
class PipelineProgram(LoadedStep):
    """A pipeline on the devices of this process, or this process's part of one.

    Args:
        lowered: what it runs.
        program: where inputs and outputs lie.
        split_step: which inputs and outputs are in pieces.
        places: where inputs and outputs of the lowered step lie between steps.
        unread: indices of inputs that nothing reads; they stay where they lie.
        loaded: programs of this process's workers by (worker, work).
        prepare: makes the lists of a step of whose batch these inputs lie on their first stage, rather than whole on
            every process.
        maker: of lists.
        announcement: of small results that are no state.
        process: number of this one.
        worker_memory: bytes a device of each worker when its list of instructions needs the most.
    """

    lowered: LoweredPipeline
    program: StepShardings
    split_step: SplitStep
    places: StepPlaces
    unread: frozenset[int]
    loaded: Mapping[tuple[int, Work], Loaded]
    prepare: Callable[[frozenset[str]], StepLists]
    maker: ListMaker
    broadcast: Broadcast
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

    def timed(self, note: Callable[[Work, float], None]) -> PipelineProgram:
        """This pipeline, which tells ``note`` the seconds of this process's programs."""
        return dataclasses.replace(self, loaded={k: clocked(v, note) for k, v in self.loaded.items()})

    # -- arguments -----------------------------------------------------------------------------

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call: state on its stage; a batch that every process has whole stays as it is."""
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
        compile_connected(self.maker.programs)
        arrays = program([leaf] if leaf.sharding.addressable_devices else None) if program.is_here else None
        return empty(leaf.shape, wanted, leaf.dtype) if arrays is None else arrays[0]

    def inputs_of(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Inputs of the lowered step by index, of some leaves by index."""
        flat: dict[int, Any] = {}
        for n, array in leaves.items():
            at = self.split_step.inputs[n]
            whole = n not in self.places.leaves or n in self.unread
            flat |= zip(at, [array] * len(at) if whole else self.places.leaves[n].split(array), strict=True)
        return flat

    def by_name(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Arrays of the lowered step's inputs by name, from those of the function and what it closes over."""
        flat = self.inputs_of(dict(enumerate(inputs)))
        return {x.name: flat[i] for i, x in enumerate(self.split_step.step.graph.inputs)}

    def without_aliases(self, inputs: Sequence[Any]) -> list[Any]:
        """``inputs``, with a copy for each that is given up, to be written over, and is the same array as another."""
        same = Counter(map(id, inputs))  # arrays are no keys: their values compare
        return [
            jnp.copy(a) if n in self.donated and same[id(a)] > 1 and a.sharding.addressable_devices else a
            for n, a in enumerate(inputs)
        ]

    def join(self, number: int, parts: Sequence[Any]) -> Any:
        """A result of the function from its outputs of the lowered step."""
        return self.places.results[number].join(parts) if len(parts) > 1 else parts[0]

    def joined(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Results of the function from outputs of the lowered step by number."""
        return [self.join(n, [outputs[i] for i in at]) for n, at in enumerate(self.split_step.outputs)]

    # -- a step --------------------------------------------------------------------------------

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step; see `autopar.runtime.loaded.LoadedProgram`."""
        with LAUNCHES.of(self):
            check_donated(leaves, self.names, self.donated)
            inputs = self.by_name(self.without_aliases([*placed, *self.constants]))
            here = self.placed_batch(inputs)
            step = self.prepare(frozenset(here))
            workers = self.carry_out(step, self.start(inputs, here))
            outputs = {n: self.output(workers, n, end) for n, end in enumerate(self.places.ends)}
            shared = self.broadcast.tell(outputs)
            give_up(leaves, self.donated)
            give_up(placed, self.donated)
            joined = self.joined({**outputs, **shared})
            LAUNCHES.launched([a for a in joined if a.sharding.addressable_devices])
        check_callbacks(self.lowered.callbacks, joined)
        return joined

    def carry_out(self, step: StepLists, start: dict[tuple[int, Buffer], Any]) -> dict[int, Worker]:
        """This process's part of some lists; returns its workers as they are then.

        Args:
            step: the lists, and the order in which they are carried out.
            start: by (worker, buffer) the arrays on this process's workers; taken from there.
        """
        in_flight = InFlight(self.broadcast.mesh)
        workers = self.workers(PermuteLinks(step.exchanges, in_flight).link, start)
        with self.lowered.callbacks.explained():
            step.carry_out(self.process, workers, self._over_processes, in_flight)
        return workers

    def workers(self, link: Callable[[int], WorkerLink], start: dict[tuple[int, Buffer], Any]) -> dict[int, Worker]:
        """This process's workers by number, with what lies on each of them when a step begins.

        Args:
            link: connections of a worker.
            start: by (worker, buffer) the arrays on this process's workers; taken from there.
        """
        workers = {}
        for worker in self.workers_here:
            buffers = {b: array for (w, b), array in start.items() if w == worker}
            workers[worker] = Worker(self._programs[worker], self.placements[worker], link(worker), buffers)
        start.clear()  # what a worker frees is gone
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
        for (worker, name), (port, mesh) in self.maker.ports.items():
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
        places = {n: self.places.origins[self.index[n]].sharding for n in self._microbatched}
        return {n for n, s in places.items() if isinstance(inputs[n], jax.Array) and inputs[n].sharding == s}

    def start(
        self,
        inputs: Mapping[str, Any],
        placed_batch: set[str],
        given: Callable[[ValueSpec], bool] = lambda _: True,
        lag: int = 0,
    ) -> dict[tuple[int, Buffer], Any]:
        """Arrays on this process's workers when lists begin.

        Args:
            inputs: of the lowered step by name.
            placed_batch: names of inputs of the batch that are global.
            given: whether the lists begin with an input.
            lag: number of the buffer of microbatch 0.
        """
        start: dict[tuple[int, Buffer], Any] = {}
        lies: set[tuple[int, str]] = set()
        for value in self.lowered.instructions.dataflow.values:
            if not value.is_input or not given(value):
                continue
            assert value.ref is not None, f"{value.name} is of no value of the step"
            name = value.ref.name
            origin, array = self.places.origins[self.index[name]], inputs[name]
            if value.ref.kind != "in":
                self.put_microbatches(start, value.name, value.stages, name, array, placed_batch, lag)
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
        place = self.places.origins[self.index[name]].sharding
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
        lag: int = 0,
    ) -> None:
        """Adds to ``start`` the microbatches of an input of the step on this process's workers.

        Args:
            start: by (worker, buffer) the arrays.
            value: its name in the dataflow.
            stages: that read it.
            name: of the input.
            array: the input: global, or whole on this process.
            placed_batch: names of inputs that are global.
            lag: number of the buffer of microbatch 0.
        """
        table, place = self.lowered.table, self.places.origins[self.index[name]]
        origin = place.worker
        dim, count = self.lowered.map.microbatching.batch[name], self.lowered.table.num_microbatches
        size = array.shape[dim] // count
        for k in range(count):
            if name in placed_batch:
                if origin in self.workers_here:
                    wanted = self.maker.microbatch(value, name, place).sharding
                    piece = start[origin, input_buffer(name, k + lag)] = _sliced(array, k * size, size, dim, wanted)
                    workers = {table.worker_of(Task("forward", s, k)) for s in stages}
                    if origin in workers:
                        start[origin, Buffer(value, k + lag)] = self.put(origin, value, piece)
                continue
            for worker in {table.worker_of(Task("forward", s, k)) for s in stages}:
                if worker in self.workers_here:
                    start[worker, Buffer(value, k + lag)] = self._cut(array, k * size, size, dim, worker, value)

    def _cut(self, array: Any, first: int, size: int, dim: int, worker: int, value: str) -> Any:
        """A microbatch of an array that this process has whole, on a worker."""
        port, mesh = self.maker.ports[worker, value]
        wanted = port.sharding(mesh)
        on_host = isinstance(array, np.ndarray)
        rows = (*(slice(None),) * dim, slice(first, first + size))
        piece: Any = array[rows] if on_host else lax.slice_in_dim(array, first, first + size, axis=dim)
        if wanted.is_fully_addressable:
            return jax.device_put(piece, wanted)
        return spread(piece, piece.dtype, wanted, copy=False)

    def put(self, worker: int, name: str, array: Any) -> Any:
        """``array`` as the programs of a worker of this process take the value of that name."""
        port, mesh = self.maker.ports[worker, name]
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


def load_pipeline(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    devices: Sequence[Any],
    donated: Sequence[int] = (),
    *,
    spared: Set[str] = frozenset(),
    by_hand: bool = True,
    flushes: bool = True,
) -> PipelineProgram:
    """Compiles a pipeline for the devices of all processes: each process the programs of its own workers.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        lowered: its pipeline.
        devices: jax devices of all processes, in the order of the cluster.
        donated: indices of the inputs that the caller gives up.
        spared: values into whose buffers no program may write.
        by_hand: whether values inside one process change hands; else they are moved by programs too.
        flushes: whether the lists are those of a step; else somebody else makes those of calls.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
        PlanMismatchError: the plan keeps something in host memory that the devices have no access to.
        ProcessMismatchError: a process has other lists.
    """
    check_host_memory(lowered.plan.content, [d for d in devices if d.process_index == jax.process_index()])
    lowered.callbacks.limit_s = wait_s()
    meshes = worker_meshes(lowered, devices)
    loaded = compiled_stages(lowered, meshes, spared)
    maker = list_maker(lowered, meshes, by_hand)
    places = places_of(lowered, split_step, maker.ports, devices)
    shardings, ends = places.shardings, places.ends
    shared = [] if by_hand and jax.process_count() == 1 else _broadcast_results(traced, split_step, ends)
    broadcast = Broadcast(shared, devices)
    by_name = {i.name: origin for i, origin in zip(split_step.step.graph.inputs, places.origins, strict=True)}
    lists = tuple(w.instructions for w in lowered.instructions.workers)

    @cache
    def prepare(placed_batch: frozenset[str]) -> StepLists:
        step = maker.make(lists, by_name, [e for e in ends if e.makers], placed_batch)
        compile_connected(maker.programs)
        return step

    open_connections((*meshes.values(), broadcast.mesh))
    first = prepare(frozenset()) if flushes else None
    broadcast.compile()
    outputs = tuple(
        broadcast.sharding if at[0] in broadcast.numbers else sharding
        for at, sharding in zip(split_step.outputs, shardings.output_shardings, strict=True)
    )
    count = len(traced.signature.traced)
    constants = zip(traced.closed_over, shardings.input_shardings[count:], strict=True)
    memory: tuple[WorkerMemory, ...] = ()
    if first is not None:
        processes = world()
        gathered = () if processes is None else (partial(_gathered, processes, traced.graph.name, first),)
        memory = memory_of_workers(lowered, loaded, *gathered)
    return PipelineProgram(
        *described_inputs(traced, donated),
        tuple(put(copied(c), s) for c, s in constants),
        lowered,
        StepShardings(shardings.input_shardings, outputs),
        split_step,
        places,
        unread_inputs(traced.graph) - set(donated),
        loaded,
        prepare,
        maker,
        broadcast,
        jax.process_index(),
        memory,
    )


def _broadcast_results(traced: Traced, split_step: SplitStep, ends: Sequence[ArrayPlace]) -> list[BroadcastResult]:
    """Small results that are no state, but for keys."""
    return [
        BroadcastResult(at[0], o.type, ends[at[0]].sharding)
        for o, at in zip(traced.graph.outputs, split_step.outputs, strict=True)
        if not o.updates and len(at) == 1 and o.type.nbytes <= SMALL_BYTES and not o.type.dtype.startswith("key<")
    ]


def memory_of_workers(
    lowered: LoweredPipeline,
    loaded: Mapping[tuple[int, Work], Loaded],
    everywhere: Callable[[_Temporaries], Iterable[_Temporaries]] = lambda here: [here],
) -> tuple[WorkerMemory, ...]:
    """Bytes a device of each worker when its list of instructions needs the most.

    Args:
        lowered: the pipeline.
        loaded: programs of this process's workers by (worker, work).
        everywhere: from the temporaries of this process's programs those of every process.
    """
    here = [
        (work.kind, work.stage, work.part, int(p.compiled.memory_analysis().temp_size_in_bytes))
        for (_, work), p in sorted(loaded.items(), key=lambda e: e[0])
        if p.compiled is not None
    ]
    temporaries: dict[Work, int] = {}
    for rows in everywhere(here):
        for kind, stage, part, size in rows:
            work = Work(kind, stage, part)
            temporaries[work] = max(size, temporaries.get(work, 0))
    return worker_memory(lowered.instructions, temporaries)


def _gathered(processes: World, name: str, step: StepLists, here: _Temporaries) -> list[_Temporaries]:
    """Temporaries of the programs of all processes, which compare their lists on the way.

    Raises:
        ProcessMismatchError: a process has other lists.
        ProcessLostError: one did not come.
    """
    turn = Agreement.next(processes, f"the lists of {name}")
    order = hashlib.sha256(f"{step.lists}{step.order}".encode()).hexdigest()
    turn.compare([("order of instructions", order[:16])])
    return [msgspec.json.decode(raw, type=_Temporaries) for raw in turn.gather(msgspec.json.encode(here))]
