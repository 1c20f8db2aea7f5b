"""One order of all workers' instructions for processes that each carry out some of them: `order_of`, `starts_of`.

A value that one worker sends to another is a program on the devices of both, which all processes that have such devices
start. Where two processes start two of these programs in different orders they wait for each other for ever. So every
process derives one order of all instructions from the lists and starts its own in that order. `check_starts` proves of
any such lists that no processes wait for each other. Nothing here knows devices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule.instructions import Free, Instruction, Recv, Run, Send, blocked_text, instruction_text, made_by


@dataclass(frozen=True)
class Launch:
    """One step of the common order: an instruction of one worker, or SENDs of a worker with the RECVs of another.

    Args:
        worker: the worker that runs the instruction, or sends.
        at: indices in that worker's list; several only for SENDs.
        target: the worker that receives; None where nothing is sent.
        target_at: indices of the RECVs in the receiver's list.
    """

    worker: int
    at: tuple[int, ...]
    target: int | None = None
    target_at: tuple[int, ...] = ()

    @property
    def workers(self) -> tuple[int, ...]:
        """The worker, or sender and receiver."""
        return (self.worker,) if self.target is None else (self.worker, self.target)


@dataclass(frozen=True)
class Order:
    """Starts of processes, in order.

    Args:
        launches: of all workers, in one order.
        starts: by process the numbers of its launches, in the order in which it starts them.
    """

    launches: tuple[Launch, ...]
    starts: tuple[tuple[int, ...], ...]


def order_of(lists: Sequence[Sequence[Instruction]]) -> tuple[Launch, ...]:
    """One order in which all instructions can be carried out where a SEND and its RECV are one event.

    Events come in the order of a run in which a backward pass takes as long as two forward passes. SENDs that
    follow each other, but for FREEs between them, are one launch where the receiver takes them one after the other.

    Args:
        lists: what each worker has to do, in order.

    Raises:
        ScheduleError: there is none: workers wait for each other.
    """
    run = _Rendezvous(lists)
    return run.launches()


def starts_of(launches: Sequence[Launch], processes: Sequence[frozenset[int]], count: int) -> Order:
    """The order, and what of it each process starts.

    Args:
        launches: instructions of all workers in one order, in which a SEND and its RECV are one.
        processes: by worker those that have devices of it.
        count: number of all processes.
    """
    starts: list[list[int]] = [[] for _ in range(count)]
    for number, launch in enumerate(launches):
        for process in sorted(frozenset[int]().union(*(processes[w] for w in launch.workers))):
            starts[process].append(number)
    return Order(tuple(launches), tuple(map(tuple, starts)))


class _Rendezvous:
    """Workers with clocks, of which sender and receiver meet."""

    def __init__(self, lists: Sequence[Sequence[Instruction]]) -> None:
        self._lists = lists
        self._at = [0] * len(lists)
        self._clock = [0] * len(lists)
        self._taken: list[set[int]] = [set() for _ in lists]
        self._due: list[tuple[int, int, int]] = []
        self._meeting: set[tuple[int, int]] = set()
        splits = any(isinstance(i, Run) and i.work.kind == "weight" for line in lists for i in line)
        self._lengths = {"forward": 1, "backward": 1 if splits else 2, "weight": 1}

    def launches(self) -> tuple[Launch, ...]:
        """All of them. ScheduleError where workers wait for each other."""
        launches: list[Launch] = []
        for worker in range(len(self._lists)):
            self._offer(worker)
        while self._due:
            _, worker, target = heapq.heappop(self._due)
            launches.append(self._alone(worker) if target < 0 else self._together(worker, target))
        stuck = [w for w, line in enumerate(self._lists) if self._at[w] < len(line)]
        if stuck:
            raise ScheduleError(
                f"workers wait for each other: {blocked_text(self._lists, self._at, stuck)}",
                cause="a value is sent before and received after another one that goes the other way",
            )
        return tuple(launches)

    def _head(self, worker: int) -> Instruction | None:
        at = self._at[worker]
        return self._lists[worker][at] if at < len(self._lists[worker]) else None

    def _offer(self, worker: int) -> None:
        """Notes what a worker's next instruction can begin."""
        head = self._head(worker)
        if isinstance(head, Send):
            self._pair(worker, head.to)
        elif isinstance(head, Recv):
            self._pair(head.source, worker)
        elif head is not None:
            heapq.heappush(self._due, (self._clock[worker], worker, -1))

    def _pair(self, source: int, target: int) -> None:
        match = self._matches(self._head(source), self._head(target), source, target)
        if match and (source, target) not in self._meeting:
            self._meeting.add((source, target))
            heapq.heappush(self._due, (max(self._clock[source], self._clock[target]), source, target))

    @staticmethod
    def _matches(send: Instruction | None, receive: Instruction | None, source: int, target: int) -> bool:
        return (
            isinstance(send, Send)
            and isinstance(receive, Recv)
            and (send.to, receive.source, send.tag) == (target, source, receive.tag)
        )

    def _alone(self, worker: int) -> Launch:
        at = self._at[worker]
        instruction = self._lists[worker][at]
        if isinstance(instruction, Run):
            self._clock[worker] += self._lengths.get(instruction.work.kind, 0)
        self._move(worker)
        self._offer(worker)
        return Launch(worker, (at,))

    def _together(self, source: int, target: int) -> Launch:
        """All values that follow each other on the way from one worker to another."""
        self._meeting.remove((source, target))
        sends, receives = [self._at[source]], [self._at[target]]
        line, into = self._lists[source], self._lists[target]
        ahead = self._at[source] + 1
        while receives[-1] + 1 < len(into):
            while ahead < len(line) and isinstance(line[ahead], Free):
                ahead += 1
            if ahead == len(line) or not self._matches(line[ahead], into[receives[-1] + 1], source, target):
                break
            sends.append(ahead)
            receives.append(receives[-1] + 1)
            ahead += 1
        self._clock[source] = self._clock[target] = max(self._clock[source], self._clock[target])
        self._taken[source].update(sends)
        self._move(source)
        self._at[target] = receives[-1] + 1
        self._offer(source)
        self._offer(target)
        return Launch(source, tuple(sends), target, tuple(receives))

    def _move(self, worker: int) -> None:
        self._at[worker] += 1
        while self._at[worker] in self._taken[worker]:
            self._at[worker] += 1


def check_starts(lists: Sequence[Sequence[Instruction]], processes: Sequence[frozenset[int]], order: Order) -> None:
    """Proves that processes which start an order come to its end, whatever the times are.

    Every process that has devices of a launch's workers starts it once; each worker's instructions are started in the
    order of its list, but for FREEs, which may come later; a SEND has its RECV; and no processes wait for each other:
    there is an order of all launches that agrees with that of every process.

    Args:
        lists: what each worker has to do, in order.
        processes: by worker those that have devices of it.
        order: what is started.

    Raises:
        ScheduleError: one of these does not hold.
    """
    _check_once(lists, processes, order)
    for process, numbers in enumerate(order.starts):
        _check_lists(lists, processes, process, [order.launches[n] for n in numbers])
    _check_circles(lists, order)


def _check_once(lists: Sequence[Sequence[Instruction]], processes: Sequence[frozenset[int]], order: Order) -> None:
    """Checks that each send has one starter, and that values arrive as the values that were sent."""
    started: dict[int, list[int]] = {}
    for process, numbers in enumerate(order.starts):
        for number in numbers:
            started.setdefault(number, []).append(process)
    for number, launch in enumerate(order.launches):
        due = sorted(frozenset[int]().union(*(processes[w] for w in launch.workers)))
        if started.get(number, []) != due:
            raise ScheduleError(
                f"{_text(lists, launch)} is started by processes {started.get(number, [])}, "
                f"and processes {due} have devices of it"
            )
        sends = [lists[launch.worker][n] for n in launch.at]
        receives = [] if launch.target is None else [lists[launch.target][n] for n in launch.target_at]
        pairs_of = [(launch.target, s.tag) for s in sends if isinstance(s, Send)]
        pairs_to = [(launch.target, r.tag) for r in receives if isinstance(r, Recv) and r.source == launch.worker]
        goes = [(s.to, s.tag) for s in sends if isinstance(s, Send)]
        if pairs_of != pairs_to or goes != pairs_of or (launch.target is not None and len(goes) != len(sends)):
            raise ScheduleError(f"{_text(lists, launch)}: what is sent is not what is received")


def _check_lists(
    lists: Sequence[Sequence[Instruction]],
    processes: Sequence[frozenset[int]],
    process: int,
    launches: Sequence[Launch],
) -> None:
    """Each instruction of the workers of a process once, in the order of its list."""
    started: dict[int, list[int]] = {w: [] for w in range(len(lists)) if process in processes[w]}
    for launch in launches:
        for worker, numbers in ((launch.worker, launch.at), (launch.target, launch.target_at)):
            if worker in started:
                started[worker].extend(numbers)
    for worker, mine in started.items():
        numbers, line = tuple(mine), lists[worker]
        if sorted(numbers) != list(range(len(line))):
            raise ScheduleError(f"process {process} does not start each instruction of worker {worker} once")
        place = {n: position for position, n in enumerate(numbers)}
        for n, later in itertools.pairwise(n for n in range(len(line)) if not isinstance(line[n], Free)):
            if place[later] < place[n]:
                raise ScheduleError(
                    f"process {process} starts {instruction_text(line[later])} of worker {worker} out of turn"
                )
        for n, i in enumerate(line):
            if isinstance(i, Free):
                before = [m for m in numbers[: place[n]] if m > n]
                early = any(place[m] > place[n] for m in range(n) if not isinstance(line[m], Free))
                if early or any(set(i.values) & set(made_by(line[m])) for m in before):
                    raise ScheduleError(
                        f"process {process} starts {instruction_text(i)} of worker {worker} out of turn"
                    )


def _check_circles(lists: Sequence[Sequence[Instruction]], order: Order) -> None:
    """Whether all processes come to their end where each waits at a launch for all that start it too."""
    together: dict[int, list[int]] = {}
    for process, numbers in enumerate(order.starts):
        for n in numbers:
            together.setdefault(n, []).append(process)
    at = [0] * len(order.starts)

    def head(process: int) -> int:
        """The launch that a process is at; -1 at its end."""
        numbers = order.starts[process]
        return numbers[at[process]] if at[process] < len(numbers) else -1

    ready = list(range(len(at)))
    while ready:
        process = ready.pop()
        while (number := head(process)) >= 0 and all(head(p) == number for p in together[number]):
            for p in together[number]:
                at[p] += 1
            ready += [p for p in together[number] if p != process]
    stuck = [p for p in range(len(at)) if head(p) >= 0]
    if not stuck:
        return
    circle, process = [], stuck[0]
    while process not in circle:
        circle.append(process)
        process = next(p for p in together[head(process)] if head(p) != head(circle[-1]))
    blocked = [f"process {p} waits at {_text(lists, order.launches[head(p)])}" for p in circle[circle.index(process) :]]
    raise ScheduleError(
        f"processes wait for each other: {'; '.join(blocked)}",
        cause="they start programs on devices of several processes in different orders",
        remedy="every process starts what `autopar.schedule.order.starts_of` says",
    )


def _text(lists: Sequence[Sequence[Instruction]], launch: Launch) -> str:
    texts = " and ".join(instruction_text(lists[launch.worker][n]) for n in launch.at)
    return f"{texts} of worker {launch.worker}"
