"""What instructions mean, and whether a program keeps to it: the one checker of all instruction lists.

The lists are run with contents in place of numbers: a content says which value a buffer holds, and of which
microbatches. Sends go through a queue for each ordered pair of workers; a worker that sends into a full queue, or
receives from an empty one, waits. As no instruction chooses, the order in which workers are taken does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule.check import check_table
from autopar.schedule.dataflow import Work, WorkSpec
from autopar.schedule.flow_check import check_dataflow
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Fetch,
    Free,
    Instruction,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
    blocked_text,
    instruction_text,
    made_by,
)
from autopar.schedule.liveness import stays
from autopar.schedule.memory import starting_buffers, transit_bytes, usage
from autopar.schedule.queues import Queues
from autopar.schedule.round_robin import run_round_robin
from autopar.schedule.table import KINDS, Task, marked_text


@dataclass(frozen=True)
class Content:
    """What a buffer holds: a value, and the microbatches that are in it (none: it is of the whole step)."""

    value: str
    microbatches: frozenset[int]


@dataclass(frozen=True)
class Verified:
    """What `verify` found out.

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
    machine.run()
    machine.check_end()
    peaks = tuple(max(u.during_bytes for u in line) for line in usage(program))
    return Verified(peaks, transit_bytes(program, depth), machine.transfers)


class _Machine:
    """Workers with their contents and the queues between them."""

    def __init__(self, program: Program, depth: int) -> None:
        self.program = program
        self.table = program.table
        self.dataflow = program.dataflow
        self.depth = depth
        self.whole = frozenset(range(self.table.num_microbatches))
        self.lists = tuple(w.instructions for w in program.workers)
        self.at = [0] * len(self.lists)
        self.held: list[dict[Buffer, Content]] = [{} for _ in self.lists]
        self.gone: list[dict[Buffer, str]] = [{} for _ in self.lists]
        self.hosted: list[dict[Buffer, Content]] = [{} for _ in self.lists]
        self.queues: Queues[Content] = Queues(depth)
        self.ran: dict[tuple[int, Work, int], int] = {}
        self.transfers = 0
        for worker, buffers in enumerate(starting_buffers(program)):
            for b in buffers:
                self.held[worker][b] = Content(
                    b.value, frozenset() if b.microbatch == NONE else frozenset({b.microbatch})
                )

    def fail(self, worker: int, fact: str, cause: str | None = None, number: int | None = None) -> ScheduleError:
        """The error for an instruction (the one that ``worker`` is at), with its cell marked."""
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
                task = Task(i.work.kind, i.work.stage, i.microbatch)
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

    def run(self) -> None:
        """Runs all lists to their end, in turn as far as each one comes."""
        stuck = run_round_robin(self.lists, self.at, self._step)
        if stuck:
            raise self.fail(
                stuck[0],
                f"deadlock with queues of {self.depth}: {blocked_text(self.lists, self.at, stuck)}",
                cause="a send waits for room in a queue or a receive for a value that comes only after it",
            )

    def _step(self, worker: int, i: Instruction) -> bool:
        """Carries an instruction out; False where it must wait."""
        match i:
            case Run() | Apply():
                self._program(worker, i)
            case Accumulate():
                self._accumulate(worker, i)
            case Send():
                if not self.queues.has_room(worker, i.to):
                    return False
                self.queues.send(worker, i.to, i.tag, self._get(worker, i.value))
            case Recv():
                return self._receive(worker, i)
            case Stash():
                self._make(worker, i.target, self._get(worker, i.source))
            case Offload():
                self.hosted[worker][i.value] = self._get(worker, i.value)
                del self.held[worker][i.value]
            case Fetch():
                if i.value not in self.hosted[worker]:
                    raise self.fail(worker, f"{i.value} is not on the host")
                self.held[worker][i.value] = self.hosted[worker].pop(i.value)
            case Free():
                for buffer in i.values:
                    self._give_up(worker, buffer, "freed")
        return True

    def _get(self, worker: int, buffer: Buffer) -> Content:
        content = self.held[worker].get(buffer)
        if content is not None:
            return content
        if buffer in self.hosted[worker]:
            raise self.fail(worker, f"{buffer} is on the host", cause="there is no FETCH before it")
        how = self.gone[worker].get(buffer)
        if how is not None:
            raise self.fail(worker, f"{buffer} is used after it was {how}")
        later = any(buffer in made_by(i) for i in self.lists[worker][self.at[worker] :])
        raise self.fail(worker, f"{buffer} is used before it is there" if later else f"{buffer} is never there")

    def _make(self, worker: int, buffer: Buffer, content: Content) -> None:
        if buffer in self.held[worker] or buffer in self.hosted[worker]:
            raise self.fail(worker, f"{buffer} is made a second time")
        self.gone[worker].pop(buffer, None)
        self.held[worker][buffer] = content

    def _give_up(self, worker: int, buffer: Buffer, how: str) -> None:
        if buffer not in self.hosted[worker]:
            self._get(worker, buffer)
        if stays(self.table, self.dataflow, worker, buffer):
            raise self.fail(worker, f"{buffer} is {how}, but belongs to the caller")
        self.held[worker].pop(buffer, None)
        self.hosted[worker].pop(buffer, None)
        self.gone[worker][buffer] = f"{how} by instruction {self.at[worker]}"

    def _receive(self, worker: int, i: Recv) -> bool:
        arriving = self.queues.first(i.source, worker)
        if arriving is None:
            return False
        tag, content = arriving
        if tag != i.tag:
            raise self.fail(
                worker, f"the next value from worker {i.source} has tag {tag}, not {i.tag}",
                cause="values are received in another order than they were sent",
            )  # fmt: skip
        self.queues.receive(i.source, worker)
        if content.value != i.value.value or not self._is_named(i.value, content):
            raise self.fail(worker, f"{content.value} of microbatch {sorted(content.microbatches)} arrives there")
        self._make(worker, i.value, content)
        return True

    def _is_named(self, buffer: Buffer, content: Content) -> bool:
        """Whether the microbatch in the buffer's name is the one in it; an accumulator under way has none."""
        if buffer.microbatch != NONE:
            return content.microbatches == {buffer.microbatch}
        return not content.microbatches or self.dataflow.by_name[content.value].lifetime == "accumulator"

    def _program(self, worker: int, i: Run | Apply) -> None:
        spec = self.dataflow.by_work.get(i.work)
        microbatch = i.microbatch if isinstance(i, Run) else NONE
        if spec is None or isinstance(i, Apply) != (i.work.kind == "update"):
            raise self.fail(worker, f"there is no such work {i.work}")
        self._check_place(worker, i.work, microbatch)
        if len(i.reads) != len(spec.reads) or len(i.writes) != len(spec.writes) + len(spec.accumulates):
            raise self.fail(
                worker, f"{i.work} reads {len(spec.reads)} values and writes {len(spec.writes) + len(spec.accumulates)}"
            )
        for name, buffer in zip(spec.reads, i.reads, strict=True):
            self._check_read(worker, spec, name, microbatch, self._get(worker, buffer))
        if set(i.donate) - set(i.reads) or len(set(i.donate)) != len(i.donate):
            raise self.fail(worker, "donates what it does not read, or twice")
        if any(i.reads.count(b) > 1 for b in i.donate):
            raise self.fail(worker, "donates a buffer that is two of its arguments")
        for buffer in i.donate:
            self._give_up(worker, buffer, "donated")
        microbatches = frozenset() if microbatch == NONE else frozenset({microbatch})
        for name, buffer in zip((*spec.writes, *spec.accumulates), i.writes, strict=True):
            if buffer != Buffer(name, microbatch):
                raise self.fail(worker, f"{buffer} is written where {Buffer(name, microbatch)} is due")
            self._make(worker, buffer, Content(name, microbatches))

    def _check_place(self, worker: int, work: Work, microbatch: int) -> None:
        if work.kind in KINDS:
            task = Task(work.kind, work.stage, microbatch)
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
        wanted = self.whole if value.lifetime == "accumulator" else microbatches
        if content.value != name:
            raise self.fail(worker, f"{spec.work} is given {content.value} for {name}")
        if content.microbatches != wanted:
            raise self.fail(worker, self._lacking(name, wanted, content.microbatches))

    def _lacking(self, name: str, wanted: frozenset[int], present: frozenset[int]) -> str:
        missing = sorted(wanted - present)
        if missing and self.dataflow.by_name[name].lifetime == "accumulator":
            return f"{name} lacks the contribution of microbatch {', '.join(map(str, missing))}"
        return f"{name} is of microbatch {sorted(present)}, not {sorted(wanted)}"

    def _accumulate(self, worker: int, i: Accumulate) -> None:
        joined = self._get(worker, i.value)
        value = self.dataflow.by_name.get(joined.value)
        if value is None or value.reduce != i.reduce:
            raise self.fail(worker, f"{joined.value} is not accumulated by {i.reduce}")
        if i.reduce == "concatenate" and joined.microbatches != {i.value.microbatch}:
            raise self.fail(
                worker, f"{i.value} holds microbatch {sorted(joined.microbatches)}, so its place is not known"
            )
        if i.into == i.value:
            raise self.fail(worker, f"{i.into} is accumulated into itself")
        if i.first:
            self._make(worker, i.into, joined)
        else:
            there = self._get(worker, i.into)
            if there.value != joined.value:
                raise self.fail(worker, f"{i.into} holds {there.value}, not {joined.value}")
            twice = sorted(there.microbatches & joined.microbatches)
            if twice:
                raise self.fail(worker, f"microbatch {', '.join(map(str, twice))} is accumulated twice")
            self.held[worker][i.into] = Content(there.value, there.microbatches | joined.microbatches)
        if i.donate:
            self._give_up(worker, i.value, "donated")

    def check_end(self) -> None:
        """All works ran, all results are there and whole."""
        for worker, row in enumerate(self.table.rows):
            for task in row:
                if (worker, Work(task.kind, task.stage), task.microbatch) not in self.ran:
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
        wanted = self.whole if self.dataflow.by_name[name].lifetime == "accumulator" else frozenset[int]()
        for worker in self.table.workers_of_stage(self.dataflow.writers[name].stage):
            content = self.held[worker].get(Buffer(name))
            end = len(self.lists[worker])
            if content is None or content.value != name:
                raise self.fail(worker, f"the result {name} is not there", number=end)
            if content.microbatches != wanted:
                raise self.fail(worker, self._lacking(name, wanted, content.microbatches), number=end)
