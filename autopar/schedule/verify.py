"""Whether a program of instructions carries out its table: the checker of all schedules with a flush.

`autopar/schedule/follow.py` says what instructions mean; here is what programs may read and what must come out.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule.check import check_dataflow, check_table
from autopar.schedule.dataflow import Work, WorkSpec, work_of
from autopar.schedule.follow import Content, Follower
from autopar.schedule.instructions import (
    NONE,
    Apply,
    Buffer,
    Program,
    Recv,
    Run,
    Send,
    instruction_text,
)
from autopar.schedule.liveness import stays
from autopar.schedule.memory import starting_buffers, transit_bytes, usage
from autopar.schedule.table import KINDS, Task, marked_text


@dataclass(frozen=True)
class Verified:
    """Result of `verify`.

    Args:
        peak_bytes: for each worker the most bytes a device at any time, in the buffers of its list.
        transit_bytes: for each worker the most bytes a device that values on their way can hold besides: those that
            were sent and freed here and did not arrive, and those that arrived and were not received here.
        num_transfers: values sent in a step.
    """

    peak_bytes: tuple[int, ...]
    transit_bytes: tuple[int, ...]
    num_transfers: int


def verify(program: Program, depth: int = 1) -> Verified:
    """Checks a program.

    Every task runs once, on its worker, with the values of its microbatch; nothing is used before it is there or after
    it was given up; what belongs to the caller is not given up; tags are unique and every send has its receive, in
    order; every accumulator gets every microbatch once before it is read; every result is there at the end; with
    queues of ``depth`` values no worker waits for ever.

    Args:
        program: the instruction lists.
        depth: values that the queue between two workers holds before the sender waits.

    Raises:
        ScheduleError: with the table, and the cell marked at or before which it fails.
    """
    check_table(program.table)
    check_dataflow(program.table, program.dataflow)
    if depth < 1:
        raise ScheduleError(f"queues of {depth} values let nothing through", remedy="use a depth of at least 1")
    if tuple(w.worker for w in program.workers) != tuple(range(program.table.num_workers)):
        raise ScheduleError(
            f"the program has lists for workers {[w.worker for w in program.workers]}, "
            f"the table has {program.table.num_workers} workers",
            table=marked_text(program.table, None),
        )
    machine = _Machine(program, depth)
    machine.check_tags()
    machine.follow(machine.lists)
    machine.check_end()
    peaks = tuple(max(u.during_bytes for u in line) for line in usage(program))
    return Verified(peaks, transit_bytes(program, depth), machine.transfers)


def _contributions(program: Program) -> dict[str, frozenset[int]]:
    """Numbers of the values joined in each accumulator."""
    table, numbers = program.table, dict[str, set[int]]()
    for spec in program.dataflow.works:
        for name in spec.accumulates:
            kind, slice_ = spec.work.kind, spec.work.part
            tasks = (
                [Task(kind, spec.work.stage, m, slice_) for m in range(table.num_microbatches)] if kind in KINDS else []
            )
            numbers.setdefault(name, set()).update(map(table.contribution, tasks))
    return {name: frozenset(some) for name, some in numbers.items()}


class _Machine(Follower):
    """Workers that carry out a program."""

    def __init__(self, program: Program, depth: int) -> None:
        super().__init__(program.dataflow, len(program.workers), depth)
        self.table = program.table
        self.whole = _contributions(program)
        self.lists = tuple(w.instructions for w in program.workers)
        self.ran: dict[tuple[int, Work, int], int] = {}
        self.transfers = 0
        for worker, buffers in enumerate(starting_buffers(program)):
            for b in buffers:
                self.on_device[worker][b] = Content(b.value, self.microbatches_named(b))

    def fail(self, worker: int, fact: str, cause: str | None = None, number: int | None = None) -> ScheduleError:
        """The error, with the cell of its instruction marked."""
        number = self.at[worker] if number is None else number
        lines = self.lists[worker]
        text = instruction_text(lines[number]) if number < len(lines) else "its end"
        return ScheduleError(
            f"schedule {self.table.name}, worker {worker}, instruction {number} ({text}): {fact}",
            cause=cause,
            table=marked_text(self.table, self._cell(worker, number)),
        )

    def _cell(self, worker: int, number: int) -> Task | None:
        """The task that an instruction belongs to: its own, else the last one before it, else the next."""
        lines = self.lists[worker]
        for i in (*reversed(lines[: number + 1]), *lines[number + 1 :]):
            if isinstance(i, Run) and i.work.kind in KINDS:
                task = Task(i.work.kind, i.work.stage, i.microbatch, i.work.part)
                return task
        return None

    def check_tags(self) -> None:
        """Every tag is in one SEND and one RECV, which name each other's workers."""
        sends: dict[int, tuple[int, int, Send]] = {}
        receives: dict[int, tuple[int, int, Recv]] = {}
        for worker, lines in enumerate(self.lists):
            for number, i in enumerate(lines):
                if isinstance(i, Send):
                    if i.tag in sends:
                        raise self.fail(
                            worker, f"tag {i.tag} was sent before, by worker {sends[i.tag][0]}", number=number
                        )
                    if i.to == worker or not 0 <= i.to < len(self.lists):
                        raise self.fail(worker, f"there is no other worker {i.to}", number=number)
                    sends[i.tag] = (worker, number, i)
                elif isinstance(i, Recv):
                    if i.tag in receives:
                        raise self.fail(
                            worker, f"tag {i.tag} is received twice, also by worker {receives[i.tag][0]}", number=number
                        )
                    receives[i.tag] = (worker, number, i)
        for tag, (worker, number, send) in sorted(sends.items()):
            if tag not in receives or receives[tag][0] != send.to or receives[tag][2].source != worker:
                raise self.fail(
                    worker, f"worker {send.to} has no RECV from worker {worker} with tag {tag}", number=number
                )
        for tag, (worker, number, receive) in sorted(receives.items()):
            if tag not in sends:
                raise self.fail(worker, f"worker {receive.source} has no SEND with tag {tag}", number=number)
        self.transfers = len(sends)

    def belongs_to_caller(self, worker: int, buffer: Buffer) -> bool:
        """Whether the caller owns it; see `stays`."""
        return stays(self.table, self.dataflow, worker, buffer)

    def run_program(self, worker: int, i: Run | Apply) -> None:
        """Reads values of its microbatch alone, and runs once where the table has it."""
        spec = self.dataflow.by_work.get(i.work)
        microbatch = i.microbatch if isinstance(i, Run) else NONE
        if spec is None or isinstance(i, Apply) != (i.work.kind in ("meeting", "update")):
            raise self.fail(worker, f"there is no such work {i.work}")
        self._check_place(worker, i.work, microbatch)
        if len(i.reads) != len(spec.reads) or len(i.writes) != len(spec.writes) + len(spec.accumulates):
            raise self.fail(
                worker, f"{i.work} reads {len(spec.reads)} values and writes {len(spec.writes) + len(spec.accumulates)}"
            )
        for name, buffer in zip(spec.reads, i.reads, strict=True):
            self._check_read(worker, spec, name, microbatch, self.get(worker, buffer))
        if set(i.donate) - set(i.reads) or len(set(i.donate)) != len(i.donate):
            raise self.fail(worker, "donates what it does not read, or twice")
        if any(i.reads.count(b) > 1 for b in i.donate):
            raise self.fail(worker, "donates a buffer that is two of its arguments")
        for buffer in i.donate:
            self.give_up(worker, buffer, "donated")
        due = [Buffer(name, microbatch) for name in spec.writes]
        due += [Buffer(name, self._contribution(i.work, microbatch)) for name in spec.accumulates]
        for wanted, buffer in zip(due, i.writes, strict=True):
            if buffer != wanted:
                raise self.fail(worker, f"{buffer} is written where {wanted} is due")
            self.put(worker, buffer, Content(buffer.value, self.microbatches_named(buffer)))

    def _contribution(self, work: Work, microbatch: int) -> int:
        if work.kind not in KINDS:
            return microbatch
        return self.table.contribution(Task(work.kind, work.stage, microbatch, work.part))

    def _check_place(self, worker: int, work: Work, microbatch: int) -> None:
        if work.kind in KINDS:
            task = Task(work.kind, work.stage, microbatch, work.part)
            if not (0 <= microbatch < self.table.num_microbatches and self.table.worker_of(task) == worker):
                raise self.fail(worker, f"{task} is not a task of worker {worker}")
        elif microbatch != NONE or worker not in self.table.workers_of_stage(work.stage):
            raise self.fail(worker, f"worker {worker} does not run {work}, or not for a microbatch")
        key = (worker, work, microbatch)
        if key in self.ran:
            raise self.fail(worker, f"the same ran before, as instruction {self.ran[key]}")
        self.ran[key] = self.at[worker]

    def _check_read(self, worker: int, spec: WorkSpec, name: str, microbatch: int, content: Content) -> None:
        value = self.dataflow.by_name[name]
        microbatches = frozenset[int]() if value.lifetime == "step" else frozenset({microbatch})
        wanted = self.whole[name] if value.lifetime == "accumulator" else microbatches
        if content.value != name:
            raise self.fail(worker, f"{spec.work} is given {content.value} for {name}")
        if content.microbatches != wanted:
            raise self.fail(worker, self._lacking(name, wanted, content.microbatches))

    def _lacking(self, name: str, wanted: frozenset[int], present: frozenset[int]) -> str:
        missing = sorted(wanted - present)
        if missing and self.dataflow.by_name[name].lifetime == "accumulator":
            return f"{name} lacks the contribution of microbatch {', '.join(map(str, missing))}"
        return f"{name} is of microbatch {sorted(present)}, not {sorted(wanted)}"

    def check_end(self) -> None:
        """All works ran, all results are there and whole."""
        for worker, row in enumerate(self.table.rows):
            for task in row:
                if (worker, work_of(task), task.microbatch) not in self.ran:
                    raise ScheduleError(
                        f"schedule {self.table.name}: worker {worker} never runs {task}",
                        table=marked_text(self.table, task),
                    )
        for spec in self.dataflow.works:
            for worker in () if spec.work.kind in KINDS else self.table.workers_of_stage(spec.work.stage):
                if (worker, spec.work, NONE) not in self.ran:
                    raise self.fail(worker, f"{spec.work} never ran", number=len(self.lists[worker]))
        for value in self.dataflow.values:
            if value.result:
                self._check_result(value.name)

    def _check_result(self, name: str) -> None:
        wanted = self.whole.get(name, frozenset[int]())
        for worker in self.table.workers_of_stage(self.dataflow.writers[name].stage):
            content = self.on_device[worker].get(Buffer(name))
            end = len(self.lists[worker])
            if content is None or content.value != name:
                raise self.fail(worker, f"the result {name} is not there", number=end)
            if content.microbatches != wanted:
                raise self.fail(worker, self._lacking(name, wanted, content.microbatches), number=end)
