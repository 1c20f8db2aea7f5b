"""The simulator: a discrete-event run of the instruction lists.

`run` simulates one step. `steady` simulates one call of a pipeline without a flush once it is full: one period of a
run that has no end.

A worker takes its list in order. RUN and APPLY keep its compute lane busy and wait for what they read; all else takes
no time on that lane. A transfer begins when its value is there, the worker came to the SEND, and earlier transfers
between the same two workers are over; it overlaps with computing. RECV provides the buffer at once; who reads it waits
until it arrived. This is how the runtimes dispatch: a list is only an order, not a time.

OFFLOAD and FETCH share one link to the host, a move at a time in the order of the list, next to computing. An OFFLOAD
stops the worker until what earlier microbatches left is gone, so that no more than one of them is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedule import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Dataflow,
    Fetch,
    Instruction,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
    Table,
    Work,
    blocked_text,
    buffer_bytes,
    build,
    get,
    marked_text,
    run_round_robin,
    starting_buffers,
    usage,
    verify,
)
from autopar.schedule.without_flush.schedules import VersionMap
from autopar.simulate.durations import Durations
from autopar.simulate.event import Event
from autopar.simulate.timeline import Timeline

#: Part of a period below which a piece of an event is rounding.
_ROUNDING = 1e-9


def run(program: Program, durations: Durations, depth: int | None = None) -> Timeline:
    """The timeline of one step.

    Args:
        program: a program that `autopar.schedule.verify` accepts.
        durations: seconds of works and transfers.
        depth: values between two workers that were sent and not yet received, before a SEND stops its worker;
            None for any number.

    Raises:
        ScheduleError: the program cannot run, or a work has no duration.
    """
    # With queues as long as the whole program only what is wrong whatever their length is found here.
    verify(program, depth or 1 + max(len(w.instructions) for w in program.workers))
    engine = _Engine(program, durations, depth)
    engine.run()
    memory = tuple(tuple(line) for line in engine.memory)
    return Timeline(program.table.num_workers, tuple(sorted(engine.events)), memory)


class _Engine:
    """Times so far: of lanes, of buffers, of transfers."""

    def __init__(self, program: Program, durations: Durations, depth: int | None) -> None:
        self.program = program
        self.durations = durations
        self.depth = depth
        self.lists = tuple(w.instructions for w in program.workers)
        self.at = [0] * len(self.lists)
        self.lane: list[float] = [0] * len(self.lists)
        self.ready: list[dict[Buffer, float]] = [dict.fromkeys(buffers, 0) for buffers in starting_buffers(program)]
        self.link: dict[tuple[int, int], float] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.arrival: dict[int, float] = {}
        self.taken: dict[tuple[int, int], list[float]] = {}
        self.host = [0.0] * len(self.lists)
        self.leaving: list[tuple[int, float]] = [(NONE, 0)] * len(self.lists)
        self.events: list[Event] = []
        self.usage = usage(program)
        self.memory: list[list[tuple[float, int]]] = [[(0, u[0].after_bytes)] for u in self.usage]

    def run(self) -> None:
        """Takes workers in turn, each as far as it comes; times do not depend on the order."""
        stuck = run_round_robin(self.lists, self.at, self._step)
        if stuck:
            raise ScheduleError(
                f"deadlock with queues of {self.depth}: {blocked_text(self.lists, self.at, stuck)}",
                table=marked_text(self.program.table, None),
            )

    def _step(self, worker: int, i: Instruction) -> bool:
        """Sets the times of an instruction; False where one that it needs is not known yet."""
        ready = self.ready[worker]
        begins: float | None = None
        match i:
            case Run() | Apply():
                begins = self._compute(worker, i)
            case Accumulate():
                ready[i.into] = max(ready[i.value], ready[i.value] if i.first else ready[i.into])
            case Send():
                if not self._send(worker, i):
                    return False
            case Recv():
                if i.tag not in self.arrival:
                    return False
                ready[i.value] = max(self.lane[worker], self.arrival[i.tag])
                self.taken.setdefault((i.source, worker), []).append(ready[i.value])
            case Stash():
                ready[i.target] = ready[i.source]
            case Offload() | Fetch():
                ready[i.value] = self._host(worker, i)
            case _:
                pass
        self._remember(worker, self.lane[worker] if begins is None else begins)
        return True

    def _compute(self, worker: int, i: Run | Apply) -> float:
        ready = self.ready[worker]
        start = max([self.lane[worker], *(ready[b] for b in i.reads)])
        end = start + self.durations.of_work(i.work)
        self.lane[worker] = end
        ready.update(dict.fromkeys(i.writes, end))
        microbatch = i.microbatch if isinstance(i, Run) else NONE
        name = str(i.work) + (f", microbatch {microbatch}" if microbatch != NONE else "")
        self.events.append(Event(start, end, worker, i.work.kind, i.work.stage, microbatch, name))
        return start

    def _send(self, worker: int, i: Send) -> bool:
        pair = (worker, i.to)
        count = self.sent.get(pair, 0)
        if self.depth is not None and count >= self.depth:
            taken = self.taken.get(pair, [])
            if len(taken) <= count - self.depth:
                return False
            self.lane[worker] = max(self.lane[worker], taken[count - self.depth])
        start = max(self.lane[worker], self.ready[worker][i.value], self.link.get(pair, 0))
        end = start + self.durations.of_transfer(i.value.value, worker, i.to)
        self.sent[pair] = count + 1
        self.link[pair] = self.arrival[i.tag] = end
        size = buffer_bytes(self.program, i.value)
        self.events.append(Event(start, end, worker, "send", NONE, i.value.microbatch, str(i.value), i.to, size))
        return True

    def _host(self, worker: int, i: Offload | Fetch) -> float:
        """Time at which a buffer is on the other side of the link to the host."""
        microbatch, gone = self.leaving[worker]
        leaves = isinstance(i, Offload)
        if leaves and microbatch != i.value.microbatch:
            self.lane[worker] = max(self.lane[worker], gone)
        start = max(self.lane[worker], self.ready[worker][i.value], self.host[worker])
        end = start + self.durations.of_host(i.value.value)
        self.host[worker] = end
        if leaves:
            self.leaving[worker] = (i.value.microbatch, end)
        name, size = f"{i.value} {'to' if leaves else 'from'} the host", buffer_bytes(self.program, i.value)
        self.events.append(Event(start, end, worker, "send", NONE, i.value.microbatch, name, NONE, size))
        return end

    def _remember(self, worker: int, begins: float) -> None:
        used = self.usage[worker][self.at[worker] + 1]
        line = self.memory[worker]
        for time, size in ((begins, used.during_bytes), (self.lane[worker], used.after_bytes)):
            if line[-1][1] != size:
                line.append((time, size))


def steady(table: Table, dataflow: Dataflow, durations: Durations) -> Timeline:
    """A call in the steady state; intervals that cross its end are shown at its beginning.

    A stage's update, with what it computes before passes, comes after each backward pass, or of "2bw" after that of
    the last microbatch, here as an equal share after each.

    Args:
        table: of a schedule without a flush.
        dataflow: its works.
        durations: seconds of works and transfers.
    """
    stages, m = table.num_stages, table.num_microbatches
    fill = 2 * stages
    program = build(get(table.name).table(stages, fill + m + 2 * stages), dataflow)
    versions = VersionMap(table.name, stages, m)
    whole = run(program, _paced(dataflow, durations, versions.update_every))
    begins = {e.microbatch: e.start_s for e in whole.computing(0) if e.kind == "forward"}
    start_s, period_s = begins[fill], begins[fill + m] - begins[fill]
    inside = (e for e in whole.events if fill <= e.microbatch < fill + m)
    events = [piece for e in inside for piece in _in_period(e, start_s, period_s, fill)]
    return Timeline(table.num_workers, tuple(sorted(events)))


def _paced(dataflow: Dataflow, durations: Durations, every: int) -> Durations:
    """Updates as a part of backward passes."""
    work_s = dict(durations.work_s)
    for spec in dataflow.works:
        if spec.work.kind in ("update", "before"):
            backward = Work("backward", spec.work.stage)
            work_s[backward] = work_s.get(backward, 0.0) + durations.of_work(spec.work) / every
            work_s[spec.work] = 0.0
    return replace(durations, work_s=work_s)


def _in_period(event: Event, start_s: float, period_s: float, first: int) -> Iterator[Event]:
    """An event in the period, in two pieces where it crosses the end."""
    begin = (event.start_s - start_s) % period_s
    end = begin + event.end_s - event.start_s
    for a, b in ((begin, min(end, period_s)), (0.0, end - period_s)):
        if b - a > _ROUNDING * period_s:
            yield replace(event, start_s=a, end_s=b, microbatch=event.microbatch - first)
