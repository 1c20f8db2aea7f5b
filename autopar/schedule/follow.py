"""Effects of instructions on buffers: lists followed with contents in place of numbers.

`Follower` gives every instruction but the programs its meaning, once for all checkers. Sends go through a queue for
each ordered pair of workers; a worker that sends into a full queue, or receives from an empty one, waits. As no
instruction chooses, the order in which workers are taken does not matter.
"""

from __future__ import annotations

import abc
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autopar.errors import ScheduleError
from autopar.schedule.dataflow import Dataflow
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Fetch,
    Free,
    Instruction,
    Offload,
    Recv,
    Run,
    Send,
    Stash,
    blocked_text,
    made_by,
)
from autopar.schedule.table import run_round_robin


@dataclass(frozen=True)
class Content:
    """Content of a buffer.

    Args:
        value: its value.
        microbatches: those that are in it; none: it is of the whole step.
        version: of the stage's state that it is or was computed from; None where there are no versions.
    """

    value: str
    microbatches: frozenset[int] = frozenset()
    version: int | None = None


class Follower(abc.ABC):
    """Workers with their contents and the queues between them.

    Args:
        dataflow: what the works read and write.
        workers: number of workers.
        depth: values that the queue between two workers holds.
    """

    def __init__(self, dataflow: Dataflow, workers: int, depth: int) -> None:
        self.dataflow = dataflow
        self.depth = depth
        self.lists: tuple[tuple[Instruction, ...], ...] = ((),) * workers
        self.at = [0] * workers
        self.on_device: list[dict[Buffer, Content]] = [{} for _ in range(workers)]
        self.on_host: list[dict[Buffer, Content]] = [{} for _ in range(workers)]
        self.gone: list[dict[Buffer, str]] = [{} for _ in range(workers)]
        self.queues: Queues[Content] = Queues(depth)

    @abc.abstractmethod
    def fail(self, worker: int, fact: str, cause: str | None = None, number: int | None = None) -> ScheduleError:
        """The error for an instruction of a worker: the one with that number, else the one that it is at."""

    @abc.abstractmethod
    def run_program(self, worker: int, i: Run | Apply) -> None:
        """Gives a program its meaning: what it reads is checked, what it writes is put."""

    @abc.abstractmethod
    def belongs_to_caller(self, worker: int, buffer: Buffer) -> bool:
        """Whether a buffer may not be given up."""

    def microbatches_named(self, buffer: Buffer) -> frozenset[int]:
        """The microbatches that a buffer's name says."""
        return frozenset() if buffer.microbatch == NONE else frozenset({buffer.microbatch})

    def follow(self, lists: Sequence[Sequence[Instruction]]) -> None:
        """Carries all lists out to their end, in turn as far as each one comes.

        Args:
            lists: what each worker has to do, in order.

        Raises:
            ScheduleError: an instruction cannot be carried out, or workers wait for ever.
        """
        self.lists, self.at = tuple(tuple(line) for line in lists), [0] * len(lists)
        self.queues = Queues(self.depth)
        stuck = run_round_robin(self.lists, self.at, self.carry_out)
        if stuck:
            raise self.fail(
                stuck[0],
                f"deadlock with queues of {self.depth}: {blocked_text(self.lists, self.at, stuck)}",
                cause="a send waits for room in a queue or a receive for a value that comes only after it",
            )

    def carry_out(self, worker: int, i: Instruction) -> bool:
        """Carries an instruction out; False where it must wait."""
        match i:
            case Run() | Apply():
                self.run_program(worker, i)
            case Accumulate():
                self._accumulate(worker, i)
            case Send():
                if not self.queues.has_room(worker, i.to):
                    return False
                self.queues.send(worker, i.to, i.tag, self.get(worker, i.value))
            case Recv():
                return self._receive(worker, i)
            case Stash():
                self.put(worker, i.target, self.get(worker, i.source))
            case Offload():
                self.on_host[worker][i.value] = self.get(worker, i.value)
                del self.on_device[worker][i.value]
            case Fetch():
                if i.value not in self.on_host[worker]:
                    raise self.fail(worker, f"{i.value} is not on the host")
                self.on_device[worker][i.value] = self.on_host[worker].pop(i.value)
            case Free():
                for buffer in i.values:
                    self.give_up(worker, buffer, "freed")
        return True

    def get(self, worker: int, buffer: Buffer) -> Content:
        """Content of a buffer on the device. ScheduleError where it is not there."""
        content = self.on_device[worker].get(buffer)
        if content is not None:
            return content
        if buffer in self.on_host[worker]:
            raise self.fail(worker, f"{buffer} is on the host", cause="there is no FETCH before it")
        how = self.gone[worker].get(buffer)
        if how is not None:
            raise self.fail(worker, f"{buffer} is used after it was {how}")
        later = any(buffer in made_by(i) for i in self.lists[worker][self.at[worker] :])
        raise self.fail(worker, f"{buffer} is used before it is there" if later else f"{buffer} is never there")

    def put(self, worker: int, buffer: Buffer, content: Content) -> None:
        """Makes a buffer. ScheduleError where it is there already."""
        if buffer in self.on_device[worker] or buffer in self.on_host[worker]:
            raise self.fail(worker, f"{buffer} is made a second time")
        self.gone[worker].pop(buffer, None)
        self.on_device[worker][buffer] = content

    def give_up(self, worker: int, buffer: Buffer, how: str) -> None:
        """Forgets a buffer, on the device or the host, that was "freed" or "donated"."""
        if buffer not in self.on_host[worker]:
            self.get(worker, buffer)
        if self.belongs_to_caller(worker, buffer):
            raise self.fail(worker, f"{buffer} is {how}, but belongs to the caller")
        self.on_device[worker].pop(buffer, None)
        self.on_host[worker].pop(buffer, None)
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
        self.put(worker, i.value, content)
        return True

    def _is_named(self, buffer: Buffer, content: Content) -> bool:
        """Whether the microbatch in the buffer's name is the one in it; an accumulator under way has none."""
        if buffer.microbatch != NONE:
            return content.microbatches == self.microbatches_named(buffer)
        return not content.microbatches or self.dataflow.by_name[content.value].lifetime == "accumulator"

    def _accumulate(self, worker: int, i: Accumulate) -> None:
        joined = self.get(worker, i.value)
        value = self.dataflow.by_name.get(joined.value)
        if value is None or (value.reduce or "sum") != i.reduce:
            raise self.fail(worker, f"{joined.value} is not accumulated by {i.reduce}")
        if i.reduce == "concatenate" and joined.microbatches != self.microbatches_named(i.value):
            raise self.fail(
                worker, f"{i.value} holds microbatch {sorted(joined.microbatches)}, so its place is not known"
            )
        if i.into == i.value:
            raise self.fail(worker, f"{i.into} is accumulated into itself")
        if i.first:
            self.put(worker, i.into, joined)
        else:
            there = self.get(worker, i.into)
            if there.value != joined.value:
                raise self.fail(worker, f"{i.into} holds {there.value}, not {joined.value}")
            twice = sorted(there.microbatches & joined.microbatches)
            if twice:
                raise self.fail(worker, f"microbatch {', '.join(map(str, twice))} is accumulated twice")
            self.on_device[worker][i.into] = replace(there, microbatches=there.microbatches | joined.microbatches)
        if i.donate:
            self.give_up(worker, i.value, "donated")


Item = TypeVar("Item")


class Queues(Generic[Item]):
    """One queue from each worker to each other.

    Args:
        depth: values that a queue holds.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queues: defaultdict[tuple[int, int], deque[tuple[int, Item]]] = defaultdict(deque)

    def has_room(self, source: int, target: int) -> bool:
        """Whether a value may be sent."""
        return len(self._queues[source, target]) < self._depth

    def send(self, source: int, target: int, tag: int, value: Item) -> None:
        """Puts a value after the others."""
        self._queues[source, target].append((tag, value))

    def first(self, source: int, target: int) -> tuple[int, Item] | None:
        """(tag, value) that is received next; None where the target has to wait."""
        queue = self._queues[source, target]
        return queue[0] if queue else None

    def receive(self, source: int, target: int) -> Item:
        """Takes the value that is received next."""
        return self._queues[source, target].popleft()[1]

    def pending(self) -> list[tuple[int, int]]:
        """(source, target) of queues that hold something, sorted."""
        return sorted(pair for pair, queue in self._queues.items() if queue)
