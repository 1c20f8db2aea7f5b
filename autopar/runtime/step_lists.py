"""The lists of a step in several processes: those of its schedule, and what workers send each other before and after.

An input of the step lies on one worker, its origin. Other workers that read it get it before they begin; an output that
replaces it and is made elsewhere goes back there at the end. `ListMaker` adds these SENDs and RECVs to the lists, puts
everything in one order, and makes the programs that move values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stage_program import Port, StageProgram
from autopar.runtime.interpreter import Worker
from autopar.runtime.transport.permutes import ArrayMove, Exchange, InFlight, MovePrograms
from autopar.schedule import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Dataflow,
    Instruction,
    Recv,
    Run,
    Send,
    Stash,
    Table,
    Task,
    ValueSpec,
    Work,
)
from autopar.schedule.order import Launch, Order, check_starts, order_of, starts_of

#: Tags of values that go before and after the lists; those of schedules count up from 0.
_FIRST_TAG = 1 << 30


@dataclass(frozen=True)
class ArrayPlace:
    """Place of an input or output of the step between steps.

    Args:
        worker: whose devices have it.
        sharding: how it lies there.
        shape: of the array.
        dtype: its short name.
        value: of an output its name in the dataflow.
        makers: of an output the workers that make it.
        microbatch: of an input that is cut into microbatches how one of them lies there if its programs do not read it.
    """

    worker: int
    sharding: NamedSharding
    shape: tuple[int, ...]
    dtype: str
    value: str = ""
    makers: tuple[int, ...] = ()
    microbatch: NamedSharding | None = None

    @property
    def array(self) -> LaidOut:
        """The array."""
        return LaidOut(self.shape, self.dtype, self.sharding)


@dataclass(frozen=True)
class LaidOut:
    """An array of a buffer: its shape, its dtype's short name, and how it lies."""

    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding


@dataclass(frozen=True, eq=False)
class StepLists:
    """Instructions of all workers in a step, and the part of them that this process starts.

    Args:
        lists: of all workers.
        order: in which they are carried out.
        exchanges: by tag the values that are sent with it.
        arrays: by (worker, buffer) how an array lies when the lists end, or was freed.
    """

    lists: tuple[tuple[Instruction, ...], ...]
    order: Order
    exchanges: Mapping[int, Exchange]
    arrays: Mapping[tuple[int, Buffer], LaidOut]

    def carry_out(
        self, process: int, workers: Mapping[int, Worker], over_processes: Set[int], in_flight: InFlight
    ) -> None:
        """A process's part of the lists, in its order.

        Args:
            process: number of this one.
            workers: those of which this process has devices, by number.
            over_processes: workers with devices of several processes.
            in_flight: of this process, which its connections take too.
        """
        for launch in (self.order.launches[n] for n in self.order.starts[process]):
            together = launch.target is None and launch.worker in over_processes
            if together:
                in_flight.begin()
            outputs: list[Any] = []
            for number, positions in ((launch.worker, launch.at), (launch.target, launch.target_at)):
                if number is not None and number in workers:
                    for at in positions:
                        outputs += workers[number].do(self.lists[number][at])
            (in_flight.started if together else in_flight.note)(outputs)
        for each in workers.values():
            each.finish()
        in_flight.end()


def input_buffer(name: str, microbatch: int = NONE) -> Buffer:
    """The buffer of an input, or of a microbatch of one, where it lies when a step begins."""
    return Buffer(f"input/{name}", microbatch)


@dataclass(frozen=True, eq=False)
class ListMaker:
    """Makes the lists of steps.

    Args:
        dataflow: of the schedule's lists.
        table: the schedule.
        stage_programs: by work.
        meshes: by (worker, stage) the devices on which the worker runs the stage.
        ports: by (worker, value) how programs take it.
        processes: by worker those that have devices of it.
        process: number of this one.
        count: number of all processes.
        batch_dims: by name of an input the dim along which microbatches are cut.
        programs: gets the programs that move values.
        by_hand: whether values inside one process change hands; else they are moved by programs too.
    """

    dataflow: Dataflow
    table: Table
    stage_programs: Mapping[Work, StageProgram]
    meshes: Mapping[tuple[int, int], Mesh]
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]]
    processes: tuple[frozenset[int], ...]
    process: int
    count: int
    batch_dims: Mapping[str, int]
    programs: MovePrograms
    by_hand: bool = True

    def make(
        self,
        lists: Sequence[Sequence[Instruction]],
        origins: Mapping[str, ArrayPlace],
        ends: Sequence[ArrayPlace],
        placed_batch: frozenset[str],
    ) -> StepLists:
        """The lists of a step of the schedule with what goes before and after it.

        Args:
            lists: of the schedule.
            origins: by name the inputs that lie somewhere when the step begins.
            ends: outputs of the step, and where they go.
            placed_batch: names of inputs in microbatches that are global; all processes have the others whole.
        """
        start: dict[tuple[int, Buffer], LaidOut] = {}
        copies = self.copies(origins, placed_batch, start)
        results = [(min(e.makers), Buffer(e.value), e, Buffer(e.value)) for e in ends if e.worker not in e.makers]
        return self.extended(lists, copies, results, start)

    def extended(
        self,
        lists: Sequence[Sequence[Instruction]],
        copies: Sequence[tuple[int, int, Buffer, Buffer]],
        results: Sequence[tuple[int, Buffer, ArrayPlace, Buffer]],
        start: Mapping[tuple[int, Buffer], LaidOut],
    ) -> StepLists:
        """Lists with what workers send each other before and after them.

        Args:
            lists: of the schedule.
            copies: (sender, receiver, buffer there, buffer here) of what is sent first.
            results: (worker, buffer there, where it goes, buffer there) of results that lie elsewhere between steps.
            start: by (worker, buffer) how an array lies when they begin, where no program's port says it.
        """
        sends = sorted(copies)
        before: list[list[Instruction]] = [[] for _ in lists]
        after: list[list[Instruction]] = [[] for _ in lists]
        for n, (source, target, value, into) in enumerate(sends):
            before[source].append(Send(value, target, _FIRST_TAG + n))
            before[target].append(Recv(into, source, _FIRST_TAG + n))
        comes: dict[int, LaidOut] = {}
        for n, (source, value, place, into) in enumerate(results):
            tag = _FIRST_TAG + len(sends) + n
            after[source].append(Send(value, place.worker, tag))
            after[place.worker].append(Recv(into, source, tag))
            comes[tag] = place.array
        whole = tuple((*a, *b, *c) for a, b, c in zip(before, lists, after, strict=True))
        return self.ordered(whole, start, comes)

    def ordered(
        self,
        lists: tuple[tuple[Instruction, ...], ...],
        start: Mapping[tuple[int, Buffer], LaidOut],
        comes: Mapping[int, LaidOut],
    ) -> StepLists:
        """Lists in one order that was checked, with the programs that move what they send.

        Args:
            lists: of all workers.
            start: by (worker, buffer) how an array lies when they begin, where no program's port says it.
            comes: by tag how a value is to arrive, where no program's port says it.
        """
        launches = order_of(lists)
        order = starts_of(launches, self.processes, self.count)
        check_starts(lists, self.processes, order)
        exchanges: dict[int, Exchange] = {}
        known = _Arrays(self, dict(start))
        for launch in launches:
            if launch.target is None:
                known.follow(launch.worker, lists[launch.worker][launch.at[0]])
                continue
            moves, tags = [], []
            for at, into_at in zip(launch.at, launch.target_at, strict=True):
                send = lists[launch.worker][at]
                assert isinstance(send, Send), "a launch of two workers holds another instruction than SEND"
                into = lists[launch.target][into_at]
                assert isinstance(into, Recv), "a launch of two workers receives by another instruction than RECV"
                move = known.sent((launch.worker, send.value), (launch.target, into.value), comes.get(send.tag))
                moves.append(move)
                tags.append(send.tag)
            exchange = self._exchange(launch, tuple(tags), moves)
            exchanges.update(dict.fromkeys(tags, exchange))
        return StepLists(lists, order, exchanges, known.arrays)

    def _exchange(self, launch: Launch, tags: tuple[int, ...], moves: Sequence[ArrayMove]) -> Exchange:
        assert launch.target is not None, "a launch of one worker sends nothing"
        a, b = self.processes[launch.worker], self.processes[launch.target]
        inside = self.by_hand and a == b and len(a) == 1
        return Exchange(tags, None if inside else self.programs.program(moves), self.process in a, self.process in b)

    def copies(
        self,
        origins: Mapping[str, ArrayPlace],
        placed_batch: Set[str],
        start: dict[tuple[int, Buffer], LaidOut],
        given: Callable[[ValueSpec], bool] = lambda _: True,
        lag: int = 0,
    ) -> list[tuple[int, int, Buffer, Buffer]]:
        """(sender, receiver, buffer there, buffer here) of inputs that workers read elsewhere than where they lie.

        Args:
            origins, placed_batch: as of `make`.
            start: gets by (worker, buffer) how an input lies when the lists begin.
            given: whether the lists begin with an input.
            lag: number of the buffer of microbatch 0.
        """
        copies: list[tuple[int, int, Buffer, Buffer]] = []
        table = self.table
        for value in self.dataflow.values:
            if not value.is_input or value.ref is None or value.ref.name not in origins or not given(value):
                continue
            name, origin = value.ref.name, origins[value.ref.name]
            if value.ref.kind == "in":
                start[origin.worker, input_buffer(name)] = origin.array
                readers = {w for s in value.stages for w in table.workers_of_stage(s)}
                copies += [
                    (origin.worker, w, input_buffer(name), Buffer(value.name))
                    for w in sorted(readers)
                    if w != origin.worker
                ]
            elif name in placed_batch:
                for k in range(table.num_microbatches):
                    source = input_buffer(name, k + lag)
                    start[origin.worker, source] = self.microbatch(value.name, name, origin)
                    readers = {table.worker_of(Task("forward", s, k)) for s in value.stages}
                    copies += [
                        (origin.worker, w, source, Buffer(value.name, k + lag))
                        for w in sorted(readers)
                        if w != origin.worker
                    ]
        return copies

    def port_array(self, worker: int, name: str) -> LaidOut:
        """A value as the first program of a worker that reads it takes it."""
        port, mesh = self.ports[worker, name]
        sizes = {str(a): int(n) for a, n in mesh.shape.items()}
        return LaidOut(port.shape(sizes), port.type.dtype, port.sharding(mesh))

    def microbatch(self, value: str, name: str, origin: ArrayPlace) -> LaidOut:
        """A microbatch of a global input on the worker where the input lies.

        Args:
            value: its name in the dataflow.
            name: of the input.
            origin: where that lies.
        """
        dim, count = self.batch_dims[name], self.table.num_microbatches
        shape = (*origin.shape[:dim], origin.shape[dim] // count, *origin.shape[dim + 1 :])
        known = self.ports.get((origin.worker, value))
        place = origin.microbatch if known is None else known[0].sharding(known[1])
        assert place is not None, f"{name} is no batch where it lies"
        return LaidOut(shape, origin.dtype, place)


def list_maker(lowered: LoweredPipeline, meshes: Mapping[tuple[int, int], Mesh], by_hand: bool) -> ListMaker:
    """The maker of lists of a pipeline.

    Args:
        lowered: the pipeline.
        meshes: by (worker, stage) the devices on which the worker runs the stage.
        by_hand: whether values inside one process change hands; else they are moved by programs too.
    """
    table, ports = lowered.table, dict[tuple[int, str], tuple[Port, Mesh]]()
    for program in sorted(lowered.programs, key=lambda p: p.work):
        for worker in table.workers_of_stage(program.work.stage):
            for port in program.reads:
                ports.setdefault((worker, port.name), (port, meshes[worker, program.work.stage]))
    processes = tuple(
        frozenset(d.process_index for (w, _), mesh in meshes.items() if w == worker for d in mesh.devices.flat)
        for worker in range(table.num_workers)
    )
    return ListMaker(
        lowered.instructions.dataflow,
        table,
        {p.work: p for p in lowered.programs},
        meshes,
        ports,
        processes,
        jax.process_index(),
        jax.process_count(),
        lowered.map.microbatching.batch,
        MovePrograms(),
        by_hand,
    )


class _Arrays:
    """Layouts of the arrays of all workers along their lists."""

    def __init__(self, maker: ListMaker, arrays: dict[tuple[int, Buffer], LaidOut]) -> None:
        self._maker = maker
        self.arrays = arrays
        self._rows: dict[tuple[int, Buffer], int] = {}

    def follow(self, worker: int, i: Instruction) -> None:
        """Notes what an instruction makes."""
        if isinstance(i, Run | Apply):
            program = self._maker.stage_programs.get(i.work)
            if program is not None and program.results:
                mesh = self._maker.meshes[worker, i.work.stage]
                sizes = {str(a): int(n) for a, n in mesh.shape.items()}
                for buffer, port in zip(i.writes, program.results, strict=True):
                    self.arrays[worker, buffer] = LaidOut(port.shape(sizes), port.type.dtype, port.sharding(mesh))
        elif isinstance(i, Accumulate):
            term = self._array(worker, i.value)
            if i.reduce == "concatenate":
                count = self._rows[worker, i.into] = (0 if i.first else self._rows[worker, i.into]) + 1
                spec = PartitionSpec(None, *term.sharding.spec)
                place = NamedSharding(term.sharding.mesh, spec, memory_kind=term.sharding.memory_kind)
                self.arrays[worker, i.into] = replace(term, shape=(count, *term.shape), sharding=place)
            elif i.first:
                self.arrays[worker, i.into] = term
        elif isinstance(i, Stash):
            self.arrays[worker, i.target] = self._array(worker, i.source)

    def sent(self, source: tuple[int, Buffer], target: tuple[int, Buffer], comes: LaidOut | None) -> ArrayMove:
        """The move of a value from a buffer of a worker to that of another."""
        array = self._array(*source)
        worker, into = target
        port = self._maker.ports.get((worker, into.value))
        if comes is not None:
            place = comes.sharding
        elif port is not None:
            place = port[0].sharding(port[1])
        else:
            place = _same_spec(array, self._any_mesh(worker))
        self.arrays[target] = replace(array, sharding=place)
        return ArrayMove(array.shape, array.dtype, array.sharding, place)

    def _any_mesh(self, worker: int) -> Mesh:
        return next(mesh for (w, _), mesh in sorted(self._maker.meshes.items(), key=lambda e: e[0]) if w == worker)

    def _array(self, worker: int, buffer: Buffer) -> LaidOut:
        """The array of a buffer: as it was made, else as the first program that reads it takes it."""
        known = self.arrays.get((worker, buffer))
        if known is not None:
            return known
        return self._maker.port_array(worker, buffer.value)


def _same_spec(array: LaidOut, mesh: Mesh) -> NamedSharding:
    """An array on another mesh: split as it is where the mesh has the same axes, else whole."""
    same = dict(mesh.shape) == dict(array.sharding.mesh.shape)
    return NamedSharding(mesh, array.sharding.spec if same else PartitionSpec())
