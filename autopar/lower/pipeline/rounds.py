"""Instruction lists in rounds that all workers begin together: what each does, where its values lie, who sends to whom.

Every device runs one program, so that all have the same arrays: slots, each a flat array of one dtype, as long as the
longest value that any worker ever has in it. A worker's values are dealt to the slots as registers are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import ScheduleError
from autopar.ir import Layout, TensorType
from autopar.ir.types import item_bytes
from autopar.lower.pipeline.grid import Axes, Grid
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.schedule import Accumulate, Apply, Buffer, Free, Instruction, Program, Recv, Run, Send, Work
from autopar.schedule.rounds import permutes_of, rounds_of

#: What a worker keeps: a buffer; one row of a concatenated one (its microbatch, else -1); a message by its tag.
Key = tuple[Buffer, int, int]

#: Tags of copies before the first round; those of the schedule count up from 0.
_FIRST_COPY = 1 << 30


@dataclass(frozen=True)
class ShardedType:
    """Type and split of a value on the devices of a worker.

    Args:
        type: its type, whole.
        layout: how it is split, over axes of the grid.
    """

    type: TensorType
    layout: Layout

    @property
    def words(self) -> int:
        """Numbers that an element lies in: of random keys the words that they are made of."""
        return int(item_bytes(self.type.dtype)) // 4 if self.is_key else 1

    @property
    def is_key(self) -> bool:
        """Whether it is typed random keys."""
        return self.type.dtype.startswith("key<")

    @property
    def dtype(self) -> str:
        """Dtype of the array that holds its numbers."""
        return "u32" if self.is_key else self.type.dtype

    def size(self, sizes: Mapping[str, int]) -> int:
        """Numbers of a device's shard."""
        return math.prod(self.shape(sizes)) * self.words

    def over(self, axes: Axes) -> ShardedType:
        """The type on a worker whose devices have these axes alone: whole over all others."""
        names = {a for a, _ in axes}
        dims = tuple(tuple(a for a in dim if a in names) for dim in self.layout.dims)
        partial = tuple(a for a in self.layout.partial if a in names)
        return ShardedType(self.type, Layout(dims, partial, self.layout.reduce if partial else "sum"))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of a device's shard."""
        return self.layout.local_shape(self.type.shape, sizes)


@dataclass(frozen=True)
class BufferCopy:
    """An input of the step that several workers read: it lies on one, which sends it to another first.

    Args:
        source: worker that has it.
        value: its buffer there.
        target: worker that reads it too.
        into: its buffer there.
    """

    source: int
    value: Buffer
    target: int
    into: Buffer


@dataclass(frozen=True)
class RoundMessage:
    """A value that a worker sends to another between two rounds.

    Args:
        exchange: number of the permute that carries it.
        key: key of the value at the receiver, or at the sender if nothing is received.
        sharded: its type and layout while it is sent.
    """

    exchange: int
    key: Key
    sharded: ShardedType


@dataclass(frozen=True)
class WorkerRound:
    """Tasks and transfers of a worker in a round.

    Args:
        arrivals: messages of the round before.
        instructions: in order; at most one of them runs a program.
        sends: messages for the next round.
        before: number of the buffer of each value when the round begins, without arrivals.
        after: number of the buffer of each value when it ends.
    """

    arrivals: tuple[RoundMessage, ...]
    instructions: tuple[Instruction, ...]
    sends: tuple[RoundMessage, ...]
    before: Mapping[Key, int]
    after: Mapping[Key, int]


@dataclass(frozen=True)
class Permute:
    """A collective-permute between two rounds, by which workers send each other values.

    Args:
        pairs: (sender, receiver), each worker once at most on either side.
        dtype: of all values.
        size: elements of the longest value; shorter ones are padded.
    """

    pairs: tuple[tuple[int, int], ...]
    dtype: str
    size: int


@dataclass(frozen=True)
class Round:
    """A round: what each worker does in it, and the collective-permutes after it."""

    worker_rounds: tuple[WorkerRound, ...]
    exchanges: tuple[Permute, ...]


@dataclass(frozen=True)
class Rounds:
    """A step of a pipeline as one program: in each round every worker runs one task at most, then all exchange values.

    Args:
        slots: (dtype, elements) of the buffers that every device has.
        rounds: in order.
        start: by worker the slot of each value when the step begins.
        end: likewise when it ends.
        sharded: by (worker, key) how values lie.
    """

    slots: tuple[tuple[str, int], ...]
    rounds: tuple[Round, ...]
    start: tuple[Mapping[Key, int], ...]
    end: tuple[Mapping[Key, int], ...]
    sharded: Mapping[tuple[int, Key], ShardedType]


def whole_key(buffer: Buffer) -> Key:
    """The key of a buffer that is no row of another."""
    return (buffer, -1, -1)


class RoundMaker:
    """Makes rounds of instruction lists.

    Args:
        program: the lists.
        programs: the stages' programs by work.
        grid: the devices of all workers.
        meshes: axes of the mesh of each stage.
    """

    def __init__(
        self,
        program: Program,
        programs: Mapping[Work, StageProgram],
        grid: Grid,
        meshes: Sequence[Axes],
    ) -> None:
        self._program, self._programs, self._grid, self._meshes = program, programs, grid, meshes
        self._sizes = dict(grid.axes)
        self._slots: list[tuple[str, int]] = []
        self._taken: list[dict[Key, int]] = [{} for _ in program.workers]
        self._sharded: dict[tuple[int, Key], ShardedType] = {}

    def make(
        self,
        start: Mapping[tuple[int, Buffer], ShardedType],
        copies: Sequence[BufferCopy] = (),
        endings: Sequence[BufferCopy] = (),
    ) -> Rounds:
        """The rounds of a step that begins with these buffers.

        Args:
            start: by (worker, buffer) how all lies that is there.
            copies: what other workers need of it besides, before they begin.
            endings: results that are to lie on another worker when the step ends.

        Raises:
            ScheduleError: the lists wait for each other, or hold what is not carried out this way.
        """
        for (worker, buffer), sharded in sorted(start.items(), key=lambda e: e[0]):
            self._place(worker, {whole_key(buffer): sharded})
        first = tuple(dict(t) for t in self._taken)
        lists = [deque(w.instructions) for w in self._program.workers]
        for n, c in enumerate(copies):
            lists[c.target].appendleft(Recv(c.into, c.source, _FIRST_COPY + n))
        for n, c in enumerate(copies):
            lists[c.source].appendleft(Send(c.value, c.target, _FIRST_COPY + n))
        for n, c in enumerate(endings):
            lists[c.source].append(Send(c.value, c.target, _FIRST_COPY + len(copies) + n))
            lists[c.target].append(Recv(c.into, c.source, _FIRST_COPY + len(copies) + n))
        coming: list[list[RoundMessage]] = [[] for _ in lists]
        rounds: list[Round] = []
        for parts in rounds_of([tuple(line) for line in lists]):
            worker_rounds: list[WorkerRound] = []
            sent: list[tuple[int, int, tuple[Key, int]]] = []
            for worker, turn in enumerate(parts):
                worker_round, messages = self._turn(worker, turn, coming[worker])
                worker_rounds.append(worker_round)
                sent += [(worker, to, key) for to, key in messages]
            coming = self._exchanged(rounds, worker_rounds, sent)
        return Rounds(tuple(self._slots), tuple(rounds), first, tuple(dict(t) for t in self._taken), self._sharded)

    def _turn(
        self, worker: int, turn: tuple[Instruction, ...], arrivals: Sequence[RoundMessage]
    ) -> tuple[WorkerRound, list[tuple[int, tuple[Key, int]]]]:
        taken = self._taken[worker]
        before = dict(taken)
        live = {k: self._sharded[worker, k] for k in taken}
        live |= {m.key: self._sharded[worker, m.key] for m in arrivals}
        here = {m.key[2]: m.key for m in arrivals} | {k[2]: k for k in taken if k[2] >= 0}
        sends: list[tuple[int, tuple[Key, int]]] = []
        for i in turn:
            if isinstance(i, Run | Apply):
                self._run(live, i)
            elif isinstance(i, Accumulate):
                self._accumulate(live, i)
            elif isinstance(i, Free):
                _forget(live, i.values)
            elif isinstance(i, Recv):
                live[whole_key(i.value)] = live.pop(here.pop(i.tag))
            elif isinstance(i, Send):
                sends.append((i.to, (whole_key(i.value), i.tag)))
            else:
                raise ScheduleError(f"{type(i).__name__} is not carried out by one program on all devices")
        for key in [k for k in taken if k not in live]:
            del taken[key]
        self._sharded.update({(worker, k): v for k, v in live.items()})
        self._place(worker, {k: v for k, v in live.items() if k not in taken})
        return WorkerRound(tuple(arrivals), turn, (), before, dict(taken)), sends

    def _run(self, live: dict[Key, ShardedType], i: Run | Apply) -> None:
        program = self._programs.get(i.work)
        if program is not None and program.results:
            for buffer, port in zip(i.writes, program.results, strict=True):
                layout = self._grid.layout(self._meshes[i.work.stage], port.layout)
                live[whole_key(buffer)] = ShardedType(port.type, layout)
        _forget(live, i.donate)

    @staticmethod
    def _accumulate(live: dict[Key, ShardedType], i: Accumulate) -> None:
        value = live[whole_key(i.value)]
        if i.reduce == "concatenate":
            live[i.into, i.value.microbatch, -1] = value
        elif i.first:
            live[whole_key(i.into)] = value
        if i.donate and i.value != i.into:
            _forget(live, (i.value,))

    def _place(self, worker: int, new: Mapping[Key, ShardedType]) -> None:
        """Deals free slots to new values of a worker: the longest first, each the shortest that is long enough."""
        taken = self._taken[worker]
        used = set(taken.values())
        for key, sharded in sorted(new.items(), key=lambda e: -e[1].size(self._sizes)):
            self._sharded[worker, key] = sharded
            size, dtype = sharded.size(self._sizes), sharded.dtype
            free = [n for n, (d, _) in enumerate(self._slots) if d == dtype and n not in used]
            enough = [n for n in free if self._slots[n][1] >= size]
            if enough:
                number = min(enough, key=lambda n: (self._slots[n][1], n))
            elif free:
                number = max(free, key=lambda n: (self._slots[n][1], -n))
                self._slots[number] = dtype, size
            else:
                number = len(self._slots)
                self._slots.append((dtype, size))
            used.add(number)
            taken[key] = number

    def _exchanged(
        self,
        rounds: list[Round],
        worker_rounds: Sequence[WorkerRound],
        sent: Sequence[tuple[int, int, tuple[Key, int]]],
    ) -> list[list[RoundMessage]]:
        """Adds a round with its first permute, and a round for each further one; returns what arrives after the last.

        Each waits for the one before, so that their order is the same on all processes.
        """
        groups = permutes_of([(s, t, self._sharded[s, what[0]].dtype, what) for s, t, what in sent])
        coming: list[list[RoundMessage]] = [[] for _ in worker_rounds]
        for number, group in enumerate(groups or [[]]):
            if number:
                worker_rounds = [self._store(worker, coming[worker]) for worker in range(len(worker_rounds))]
            coming = [[] for _ in worker_rounds]
            outgoing: list[list[RoundMessage]] = [[] for _ in worker_rounds]
            size, dtype = 0, ""
            for source, to, (key, tag) in group:
                sharded = self._sharded[source, key].over(self._grid.axes_of(to))
                size, dtype = max(size, sharded.size(self._sizes)), sharded.dtype
                arrived: Key = (key[0], -1, tag)
                self._sharded[to, arrived] = sharded
                outgoing[source].append(RoundMessage(0, key, sharded))
                coming[to].append(RoundMessage(0, arrived, sharded))
            exchanges = (Permute(tuple((s, t) for s, t, _ in group), dtype, size),) if group else ()
            rounds.append(
                Round(
                    tuple(replace(t, sends=tuple(o)) for t, o in zip(worker_rounds, outgoing, strict=True)), exchanges
                )
            )
        return coming

    def _store(self, worker: int, arrivals: Sequence[RoundMessage]) -> WorkerRound:
        """A turn that keeps what arrived."""
        before = dict(self._taken[worker])
        self._place(worker, {m.key: self._sharded[worker, m.key] for m in arrivals})
        return WorkerRound(tuple(arrivals), (), (), before, dict(self._taken[worker]))


def _forget(live: dict[Key, ShardedType], buffers: Sequence[Buffer]) -> None:
    gone = set(buffers)
    for key in [k for k in live if k[0] in gone and k[2] < 0]:
        del live[key]
