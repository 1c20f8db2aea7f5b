"""`asynchronous`: workers that compute gradients by themselves, and one state that takes them as they come.

Asynchronous (no bound) and stale synchronous parallelism (Ho et al., NIPS'13, section 3) in one loop without threads
of its own: workers are whatever answers with futures, as the threads of an executor or Ray actors. The order that
happened comes back with the state; `replay` gives the same state from it on one device.

`Clocks` says which worker may go on. A worker at clock c (updates done) may begin another while ``c - min over workers
<= s``; what it reads then contains the first c - s updates of every worker. s = 0 is bulk synchronous, no bound is
asynchronous. No I/O and no time: events in, decisions out, so that any order of events can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autopar.errors import AutoparError


class Corrected(Protocol):
    """The correction for the age of a worker's gradients; see `autopar.transforms.corrections`."""

    def __call__(self, gradients: Any, now: Any, read: Any, age: int) -> Any:
        """The gradients to update ``now`` with, of those at ``read``, which is ``age`` updates old."""


@dataclass(frozen=True)
class Clocks:
    """Updates that each worker has done.

    Args:
        counts: by worker.
        bound: s, the most that a worker may be ahead of the slowest when it begins; None: no bound.
    """

    counts: tuple[int, ...]
    bound: int | None

    @staticmethod
    def of(workers: int, bound: int | None) -> Clocks:
        """The start.

        Args:
            workers: their number.
            bound: updates by which a worker may be ahead of the slowest when it begins one; None: any number.

        Raises:
            AutoparError: one of them is no count.
        """
        if workers < 1 or (bound is not None and bound < 0):
            raise AutoparError(f"{workers} workers with a bound of {bound}", remedy="a positive number, and 0 or more")
        return Clocks((0,) * workers, bound)

    def may_begin(self, worker: int) -> bool:
        """Whether a worker may begin its next update."""
        return self.bound is None or self.counts[worker] - min(self.counts) <= self.bound

    def done(self, worker: int) -> Clocks:
        """The clocks after one more update of a worker."""
        return replace(self, counts=tuple(c + (w == worker) for w, c in enumerate(self.counts)))

    def leave(self, worker: int) -> Clocks:
        """The clocks without a worker that was lost: it holds nobody back; later workers move up by one."""
        return replace(self, counts=self.counts[:worker] + self.counts[worker + 1 :])

    def seen(self, worker: int) -> int:
        """Updates of each worker that are in what a worker that begins reads, at least: no fewer than c - s."""
        return min(self.counts)


@dataclass(frozen=True)
class WorkerEvent:
    """Something that a worker did.

    Args:
        worker: its number.
        kind: "read" or "update".
    """

    worker: int
    kind: str


def replay(
    gradients: Callable[[Any, int, int], Any],
    update: Callable[[Any, Any], Any],
    state: Any,
    events: Sequence[WorkerEvent],
    workers: int,
    bound: int | None = None,
    corrected: Corrected | None = None,
) -> Any:
    """The state after a recorded order of events, on one device.

    Args:
        gradients: G(state read, worker, its clock).
        update: U(state, gradients).
        state: the first one.
        events: in the order in which they happened.
        workers: their number.
        bound: that the order has to keep.
        corrected: (gradients, state now, state read, age in updates) -> gradients to update with; None leaves them.

    Raises:
        AutoparError: an event breaks the bound, or a worker updates what it did not read.
    """
    clocks = Clocks.of(workers, bound)
    read: dict[int, tuple[Any, int]] = {}
    updates = 0
    for number, event in enumerate(events):
        if event.kind == "read":
            if event.worker in read or not clocks.may_begin(event.worker):
                raise AutoparError(
                    f"event {number}: worker {event.worker} reads at clocks {clocks.counts}, bound {bound}"
                )
            read[event.worker] = state, updates
        else:
            if event.worker not in read:
                raise AutoparError(f"event {number}: worker {event.worker} updates without having read")
            before, version = read.pop(event.worker)
            grads = gradients(before, event.worker, clocks.counts[event.worker])
            grads = grads if corrected is None else corrected(grads, state, before, updates - version)
            state, clocks, updates = update(state, grads), clocks.done(event.worker), updates + 1
    return state


def drawn_events(
    seconds: Callable[[int], float], workers: int, updates: int, bound: int | None
) -> tuple[WorkerEvent, ...]:
    """The order of events of workers that take so long for an update; who waits begins as soon as it may.

    Args:
        seconds: of the next update of a worker.
        workers: their number.
        updates: of all workers together.
        bound: updates by which a worker may be ahead of the slowest when it begins one; None: any number.
    """
    clocks = Clocks.of(workers, bound)
    events: list[WorkerEvent] = []
    ends: dict[int, float] = {}
    now = 0.0
    while len(events) < 2 * updates:
        for worker in range(workers):
            if worker not in ends and clocks.may_begin(worker):
                ends[worker] = now + seconds(worker)
                events.append(WorkerEvent(worker, "read"))
        worker = min(ends, key=lambda w: (ends[w], w))
        now = ends.pop(worker)
        clocks = clocks.done(worker)
        events.append(WorkerEvent(worker, "update"))
    return tuple(events)


@dataclass(frozen=True)
class AsynchronousRun:
    """The record of a run of `asynchronous`.

    Args:
        state: the last one.
        events: reads and updates in the order in which they happened.
        ages: by update how many others came between its read and it.
    """

    state: Any
    events: tuple[WorkerEvent, ...]
    ages: tuple[int, ...]


def asynchronous(
    submit: Callable[[int, Any, int], Future[Any]],
    update: Callable[[Any, Any], Any],
    state: Any,
    workers: int,
    updates: int,
    bound: int | None = None,
    corrected: Corrected | None = None,
) -> AsynchronousRun:
    """Trains with workers that do not wait for each other, or for no more than ``bound`` updates of the slowest.

    With a bound of 0 the gradients of a round are applied in the order of the workers, whoever was first: the run is
    the synchronous one to the bit.

    Args:
        submit: (worker, state that it reads, its clock) -> future of the gradients: ``executor.submit(G, state, ..)``,
            ``actor.gradients.remote(state, clock).future()`` of Ray.
        update: U(state, gradients).
        state: the first one.
        workers: their number.
        updates: of all workers together.
        bound: updates by which a worker may be ahead of the slowest when it begins one; None: any number.
        corrected: changes stale gradients before they are applied; None applies them as they are.

    Raises:
        AutoparError: a number is none. What a worker raises is raised here.
    """
    if updates < 1:
        raise AutoparError(f"{updates} updates", remedy="give a positive number")
    clocks, begun = Clocks.of(workers, bound), 0
    running: dict[int, Future[Any]] = {}
    read: dict[int, tuple[Any, int]] = {}
    events: list[WorkerEvent] = []
    ages: list[int] = []
    while True:
        for worker in range(workers):
            if worker not in running and begun < updates and clocks.may_begin(worker):
                events.append(WorkerEvent(worker, "read"))
                read[worker] = state, len(ages)
                running[worker] = submit(worker, state, clocks.counts[worker])
                begun += 1
        if not running:
            return AsynchronousRun(state, tuple(events), tuple(ages))
        wait(running.values(), return_when=ALL_COMPLETED if bound == 0 else FIRST_COMPLETED)
        for worker in [w for w, future in sorted(running.items()) if future.done()]:
            gradients, (before, version) = running.pop(worker).result(), read.pop(worker)
            age = len(ages) - version
            state = update(state, gradients if corrected is None else corrected(gradients, state, before, age))
            clocks = clocks.done(worker)
            events.append(WorkerEvent(worker, "update"))
            ages.append(age)
