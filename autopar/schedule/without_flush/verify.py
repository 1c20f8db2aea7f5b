"""Whether the lists of a pipeline without a flush keep to their version map: read from the instructions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule.dataflow import WorkSpec
from autopar.schedule.follow import Content, Follower
from autopar.schedule.instructions import (
    Apply,
    Buffer,
    Fetch,
    Instruction,
    Offload,
    Run,
    instruction_text,
)
from autopar.schedule.without_flush.lists import METRICS, SHARED, STATE, StaleFlow, Window, Windows


@dataclass(frozen=True)
class StaleAudit:
    """Versions read and held, microbatches in flight and updates by an asynchronous pipeline's instruction lists.

    Args:
        reads: (pass, stage, microbatch) -> version that it reads; of stages whose passes read state.
        versions: by stage the most versions of its state at once, the newest among them.
        in_flight: by stage the most microbatches whose forward pass is done and whose backward pass is not.
        updates: by stage how many there were.
    """

    reads: Mapping[tuple[str, int, int], int]
    versions: tuple[int, ...]
    in_flight: tuple[int, ...]
    updates: tuple[int, ...]


def audit_lists(windows: Windows, calls: int | None = None, depth: int = 1) -> StaleAudit:
    """Follows the lists over some calls and the drain.

    Args:
        windows: of all calls.
        calls: their number; None takes three more than until the lists repeat.
        depth: values that a queue between two workers holds.

    Raises:
        ScheduleError: a pass reads what is not there, of another microbatch or another version than its map says; an
            update lacks a microbatch; a worker waits for ever; something is left after the drain.
    """
    machine = _StaleMachine(windows.flow, depth)
    count = windows.flow.steady + 3 if calls is None else calls
    for call in range(count):
        machine.run(windows.call(call), call)
    machine.run(windows.drain(count), count)
    machine.check_end(count)
    return StaleAudit(machine.reads, tuple(machine.most), tuple(machine.flying_most), tuple(machine.updates))


class _StaleMachine(Follower):
    """Workers that carry out one call after the other."""

    def __init__(self, flow: StaleFlow, depth: int) -> None:
        count = flow.stages
        super().__init__(flow.dataflow, count, depth)
        self.flow = flow
        self.updates, self.most, self.flying, self.flying_most = ([n] * count for n in (0, 1, 0, 0))
        self.reads: dict[tuple[str, int, int], int] = {}
        self.call = 0
        for value in flow.dataflow.values:
            if value.is_input and value.lifetime == "step":
                for s in value.stages:
                    self.on_device[s][Buffer(value.name)] = Content(value.name, version=0)

    def fail(self, worker: int, fact: str, cause: str | None = None, number: int | None = None) -> ScheduleError:
        """The error, with the call that it happened in."""
        lines, at = self.lists[worker], self.at[worker] if number is None else number
        text = instruction_text(lines[at]) if at < len(lines) else "its end"
        name = self.flow.versions.name
        return ScheduleError(
            f"schedule {name}, call {self.call}, worker {worker}, instruction {at} ({text}): {fact}", cause=cause
        )

    def belongs_to_caller(self, worker: int, buffer: Buffer) -> bool:
        """Nothing does between two calls: versions are freed by the lists."""
        return False

    def microbatches_named(self, buffer: Buffer) -> frozenset[int]:
        """Counted over all calls."""
        return frozenset({self._global(buffer.microbatch)})

    def run(self, window: Window, call: int) -> None:
        """Carries a call out."""
        self.call = call
        for s, buffers in enumerate(self.on_device):
            carried = {b for b in buffers if self.flow.is_carried(b)}
            if carried != window.starts[s]:
                raise self.fail(s, f"begins with {_names(window.starts[s] ^ carried)} more or less than is there")
            for b in window.batch[s]:
                buffers[b] = Content(b.value, self.microbatches_named(b))
        self.follow([w.instructions for w in window.workers])
        left = self.queues.pending()
        if left:
            raise self.fail(left[0][1], f"what worker {left[0][0]} sent is not received")
        for s, buffers in enumerate(self.on_device):
            shifted = {(self.flow.shifted(b) if self.flow.is_carried(b) else b): c for b, c in buffers.items()}
            self.on_device[s] = shifted
            self.gone[s] = {}

    @property
    def _m(self) -> int:
        return self.flow.microbatches

    def carry_out(self, worker: int, i: Instruction) -> bool:
        """Carries an instruction out and counts the versions that are there after it."""
        if isinstance(i, Offload | Fetch):
            raise self.fail(worker, "is no instruction of such a list")
        if not super().carry_out(worker, i):
            return False
        buffers = self.on_device[worker].items()
        live = {c.version for b, c in buffers if c.version is not None and b.value in self._versions(worker)}
        self.most[worker] = max(self.most[worker], len(live | {self.updates[worker]}))
        return True

    def put(self, worker: int, buffer: Buffer, content: Content) -> None:
        """Makes a buffer; the newest state takes the place of the one before."""
        if buffer.value in self.flow.state and buffer == Buffer(buffer.value):
            self.on_device[worker].pop(buffer, None)
        super().put(worker, buffer, content)

    def run_program(self, worker: int, i: Run | Apply) -> None:
        """Reads the versions of the map, and runs for the microbatch whose turn it is."""
        if isinstance(i, Apply):
            self._apply(worker, i)
        elif i.work.kind == "before":
            for b in i.writes:
                self.on_device[worker][b] = Content(b.value, version=self.updates[worker])
        else:
            self._pass(worker, i)

    def _versions(self, worker: int) -> tuple[str, ...]:
        return self.flow.versioned[worker]

    def _global(self, number: int) -> int:
        return number - self.flow.lag + self.call * self._m

    def _pass(self, worker: int, i: Run) -> None:
        spec = self._spec(worker, i)
        numbers = {b.microbatch for b in i.writes} or {
            b.microbatch for b in i.reads if self.flow.dataflow.by_name[b.value].lifetime != "step"
        }
        if len(numbers) != 1:
            raise self.fail(worker, f"is of microbatches {sorted(numbers)}")
        (number,) = numbers
        k = self._global(number)
        if k % self._m != i.microbatch:
            raise self.fail(worker, f"microbatch {k} is number {k % self._m} of its call")
        for b in i.reads:
            content = self.get(worker, b)
            if b.value in self.flow.versioned[worker]:
                wanted = self.flow.versions.reads(worker, k)
                if content.version != wanted:
                    raise self.fail(worker, f"microbatch {k} reads version {content.version} of {b}, not {wanted}")
                self.reads[i.work.kind, worker, k] = wanted
            elif self.flow.dataflow.by_name[b.value].lifetime != "step" and content.microbatches != {k}:
                raise self.fail(worker, f"{b} is of microbatch {sorted(content.microbatches)}, not {k}")
        for name, b in zip((*spec.writes, *spec.accumulates), i.writes, strict=True):
            self.put(worker, b, Content(name, frozenset({k})))
        self.flying[worker] += 1 if i.work.kind == "forward" else -1
        self.flying_most[worker] = max(self.flying_most[worker], self.flying[worker])

    def _spec(self, worker: int, i: Run | Apply) -> WorkSpec:
        spec = self.flow.spec(i.work.kind, worker, i.work.part)
        if spec is None or i.work.stage != worker:
            raise self.fail(worker, f"there is no such work {i.work}")
        if tuple(b.value for b in i.reads) != spec.reads:
            raise self.fail(worker, f"{i.work} reads {_names(i.reads)}")
        return spec

    def _apply(self, worker: int, i: Apply) -> None:
        spec = self._spec(worker, i)
        done, every = self.updates[worker], self.flow.versions.update_every
        due = frozenset(range(done * every, (done + 1) * every))
        if i.work.part == METRICS:
            due = frozenset(range(self.call * self._m, (self.call + 1) * self._m))
        for b in i.reads:
            content = self.get(worker, b)
            if self.flow.dataflow.by_name[b.value].lifetime == "accumulator":
                if content.microbatches != due:
                    raise self.fail(worker, f"{b.value} is of microbatches {sorted(content.microbatches)}, not {due}")
            elif b.value in self.flow.state and content.version != done:
                raise self.fail(worker, f"updates version {content.version} of {b.value}; the newest is {done}")
        new = done + (i.work.part != METRICS)
        for name, b in zip(spec.writes, i.writes, strict=True):
            if i.work.part == STATE and b != Buffer(self.flow.replaces[name]):
                raise self.fail(worker, f"{name} is written to {b}")
            self.put(worker, b, Content(b.value, version=new))
        if i.work.part == METRICS:
            for b in i.writes:
                del self.on_device[worker][b]  # the caller's
        # Where a stage has both, the shared part runs first and the other completes the update.
        if i.work.part == STATE or (i.work.part == SHARED and self.flow.spec("update", worker, STATE) is None):
            self.updates[worker] = new

    def check_end(self, calls: int) -> None:
        """Everything ran, and nothing is left but the newest state and the versions that a next call would read."""
        wanted = calls * self.flow.step
        for s, buffers in enumerate(self.on_device):
            has = any(self.flow.spec("update", s, part) for part in (STATE, SHARED))
            if has and self.updates[s] != wanted:
                raise self.fail(s, f"made {self.updates[s]} updates of {wanted}")
            left = [b for b, c in buffers.items() if c.microbatches]
            if left:
                raise self.fail(s, f"{_names(left)} is left after the drain")


def _names(buffers: Iterable[Buffer]) -> str:
    return ", ".join(map(str, sorted(buffers))) or "nothing"
