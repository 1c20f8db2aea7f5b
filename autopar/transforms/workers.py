"""`asynchronous`: workers that compute gradients by themselves, and one state that takes them as they come.

Asynchronous (no bound) and stale synchronous parallelism (Ho et al., NIPS'13) in one loop without threads of its own:
workers are whatever answers with futures, as the threads of an executor or Ray actors. The order that happened comes
back with the state; `autopar.transforms.replay` gives the same state from it on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.transforms.bounded import Clocks, Corrected, WorkerEvent


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
        bound: see `Clocks`.
        corrected: see `autopar.transforms.replay`.

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
