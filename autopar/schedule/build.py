"""Builds a checked program from a table and a dataflow: what runs where, and what is sent where.

`build` returns the instruction lists; `place` makes them, before anything is freed or checked.

The lists are made in one walk over a run of the table in which all passes take as long as usual. Where a value is
made, its SEND goes to the end of the maker's list and its RECV to the end of the receiver's list at the same moment.
The walk itself is therefore a run of the lists in which no queue ever holds more than one value; and as lists without
choices always come to the same end, they never wait for each other in a circle, whatever the real times are and
however short the queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.plan.pipeline import WorkKind
from autopar.schedule.check import check_dataflow, check_table
from autopar.schedule.dataflow import Dataflow, ValueSpec, work_of
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    WorkerProgram,
)
from autopar.schedule.liveness import free_early
from autopar.schedule.offload import offload_activations
from autopar.schedule.table import Table, Task, marked_text, start_times
from autopar.schedule.verify import verify

#: Backward takes about twice as long as forward where it is not split.
_WHOLE: Mapping[str, int] = MappingProxyType({"forward": 1, "backward": 2})
_SPLIT: Mapping[str, int] = MappingProxyType({"forward": 1, "backward": 1, "weight": 1})


def place(table: Table, dataflow: Dataflow) -> tuple[WorkerProgram, ...]:
    """RUN, SEND, RECV, ACCUMULATE and APPLY of every worker; nothing is freed or donated.

    Args:
        table: a table that `check_table` accepts.
        dataflow: a dataflow that `check_dataflow` accepts for it.

    Raises:
        ScheduleError: a task reads what is made only later; the cell is marked.
    """
    walk = _PlacedLists(table, dataflow)
    walk.before()
    walk.tasks()
    walk.update()
    return tuple(WorkerProgram(w, tuple(lines)) for w, lines in enumerate(walk.lists))


class _PlacedLists:
    """The lists so far, and where every buffer is."""

    def __init__(self, table: Table, dataflow: Dataflow) -> None:
        self.table = table
        self.dataflow = dataflow
        self.lists: list[list[Instruction]] = [[] for _ in table.rows]
        self.where: dict[Buffer, set[int]] = {}
        self.started: set[tuple[int, str]] = set()
        self.tags = 0
        for value in dataflow.values:
            if value.is_input:
                self._put_input(value)

    def _put_input(self, value: ValueSpec) -> None:
        if value.lifetime == "step":
            self.where[Buffer(value.name)] = {w for s in value.stages for w in self.table.workers_of_stage(s)}
            return
        for microbatch in range(self.table.num_microbatches):
            homes = {self.table.worker_of(Task("forward", s, microbatch)) for s in value.stages}
            self.where[Buffer(value.name, microbatch)] = homes

    def before(self) -> None:
        """Works that run once, and what is sent once, before the first microbatch."""
        for value in self.dataflow.values:
            if value.is_input and value.lifetime == "step":
                self._send(Buffer(value.name), self._step_readers(value.name))
        self._once("before")

    def tasks(self) -> None:
        """Forward, backward and weight of all microbatches."""
        lengths = _SPLIT if self.table.splits_backward else _WHOLE
        starts = start_times(self.table, lengths)
        if self.dataflow.meets:
            self._walk({t: time for t, time in starts.items() if t.kind == "forward"}, lengths)
            self._meeting()
            starts = {t: time for t, time in starts.items() if t.kind != "forward"}
        self._walk(starts, lengths)

    def _walk(self, starts: Mapping[Task, int], lengths: Mapping[str, int]) -> None:
        """Tasks in the order in which they begin and end."""
        # What ends at some time comes before what starts then, so that a value is received by its first user's start.
        moments = [(time, 1, self.table.worker_of(t), t) for t, time in starts.items()]
        moments += [(time + lengths[t.kind], 0, self.table.worker_of(t), t) for t, time in starts.items()]
        for _, begins, worker, task in sorted(moments):
            if begins:
                self._run(worker, task)
            else:
                self._pass_on(worker, task)

    def _meeting(self) -> None:
        """Works that run once between all forward and all backward passes, with what they send."""
        for value in self.dataflow.values:
            if value.lifetime == "accumulator" and self._is_met(value.name):
                self._complete(value)
        self._once("meeting")

    def _is_met(self, name: str) -> bool:
        return any(w.kind == "meeting" for w in self.dataflow.readers.get(name, ()))

    def update(self) -> None:
        """Works that run once after the last microbatch, with what they send."""
        for value in self.dataflow.values:
            if value.lifetime == "accumulator" and not self._is_met(value.name):
                self._complete(value)
        self._once("update")

    def _once(self, kind: WorkKind) -> None:
        specs = sorted((s for s in self.dataflow.works if s.work.kind == kind), key=lambda s: (s.work.part, s.work))
        for spec in specs:
            reads = tuple(map(Buffer, spec.reads))
            writes = tuple(map(Buffer, spec.writes))
            workers = self.table.workers_of_stage(spec.work.stage)
            for worker in workers:
                if kind != "before":
                    self.lists[worker].append(Apply(spec.work, reads, writes))
                else:
                    self.lists[worker].append(Run(spec.work, NONE, reads, writes))
            for buffer in writes:
                self.where[buffer] = set(workers)
                self._send(buffer, self._step_readers(buffer.value))

    def _run(self, worker: int, task: Task) -> None:
        spec = self.dataflow.by_work[work_of(task)]
        reads = tuple(self._buffer(n, task.microbatch) for n in spec.reads)
        for buffer in reads:
            if not self.where.get(buffer):
                writer = self.dataflow.writers.get(buffer.value)
                raise ScheduleError(
                    f"{task} reads {buffer}, which {writer} makes only later",
                    cause="the dataflow leads against the order of the stages",
                    remedy="number stages so that values go from lower to higher ones in forward, and back in backward",
                    table=marked_text(self.table, task),
                )
            self._send(buffer, (worker,))
        contributed = tuple(Buffer(n, self.table.contribution(task)) for n in spec.accumulates)
        writes = (*(Buffer(n, task.microbatch) for n in spec.writes), *contributed)
        self.lists[worker].append(Run(spec.work, task.microbatch, reads, writes))

    def _pass_on(self, worker: int, task: Task) -> None:
        spec = self.dataflow.by_work[work_of(task)]
        for name in spec.writes:
            buffer = Buffer(name, task.microbatch)
            self.where[buffer] = {worker}
            self._send(buffer, map(self.table.worker_of, self._reading_tasks(name, task.microbatch)))
        for name in spec.accumulates:
            contribution = Buffer(name, self.table.contribution(task))
            self.where[contribution] = {worker}
            reduce = self.dataflow.by_name[name].reduce or "sum"
            # Partial sums of two workers are exchanged at the end; concatenated parts go to both at once.
            users = self.table.workers_of_stage(task.stage) if reduce == "concatenate" else (worker,)
            self._send(contribution, users)
            for user in users:
                first = (user, name) not in self.started
                self.started.add((user, name))
                self.lists[user].append(Accumulate(Buffer(name), contribution, reduce, first))

    def _complete(self, value: ValueSpec) -> None:
        """Exchanges partial sums where a stage has two workers, and sends the accumulator to those that read it."""
        workers = self.table.workers_of_stage(self.dataflow.writers[value.name].stage)
        total = Buffer(value.name)
        reduce = value.reduce or "sum"
        if len(workers) == 2 and reduce != "concatenate":
            for worker, other in (workers, workers[::-1]):
                self._transfer(total, Buffer(value.name, NONE, worker), worker, other)
            for worker, other in (workers, workers[::-1]):
                # a + b on one worker and b + a on the other are the same bits, so the replicas stay equal.
                self.lists[worker].append(Accumulate(total, Buffer(value.name, NONE, other), reduce))
        self.where[total] = set(workers)
        self._send(total, self._step_readers(value.name))

    def _buffer(self, name: str, microbatch: int) -> Buffer:
        return Buffer(name, microbatch) if self.dataflow.by_name[name].lifetime == "microbatch" else Buffer(name)

    def _reading_tasks(self, name: str, microbatch: int) -> list[Task]:
        works = self.dataflow.readers.get(name, ())
        return [
            Task(w.kind, w.stage, microbatch, w.part)
            for w in works
            if w.kind != "before" and w.kind != "meeting" and w.kind != "update"
        ]

    def _step_readers(self, name: str) -> tuple[int, ...]:
        works = self.dataflow.readers.get(name, ())
        return tuple(w for work in works for w in self.table.workers_of_stage(work.stage))

    def _send(self, buffer: Buffer, workers: Iterable[int]) -> None:
        """Sends a buffer to all of ``workers`` that do not have it."""
        there = self.where[buffer]
        source = min(there)
        for worker in sorted(set(workers) - there):
            self._transfer(buffer, buffer, source, worker)
            there.add(worker)

    def _transfer(self, sent: Buffer, received: Buffer, source: int, target: int) -> None:
        self.lists[source].append(Send(sent, target, self.tags))
        self.lists[target].append(Recv(received, source, self.tags))
        self.tags += 1


def build(table: Table, dataflow: Dataflow, depth: int = 1) -> Program:
    """The instruction lists that carry ``table`` out: placed, freed early, what waits moved to hosts, verified.

    Args:
        table: what each worker computes.
        dataflow: what its works read and write.
        depth: values that a queue between two workers holds.

    Raises:
        ScheduleError: the table cannot run, or the dataflow does not fit it.
    """
    check_table(table)
    check_dataflow(table, dataflow)
    freed = free_early(table, dataflow, place(table, dataflow))
    program = Program(table, dataflow, offload_activations(dataflow, freed))
    verify(program, depth)
    return program
