"""Workers in one process: arrays change hands, and `jax.device_put` moves them between meshes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.errors import ScheduleError
from autopar.runtime.transport.base import ArrivalLink, StepAbortedError


class WorkerQueues:
    """The queues between all workers of a process, which may be threads."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int], deque[tuple[int, Any]]] = {}
        self.changed = threading.Condition()
        self.given_up = False

    def link(self, worker: int) -> ArrivalLink:
        """The connections of one worker."""
        return _QueueLink(worker, self)

    def give_up(self) -> None:
        """Ends all waiting in `WorkerLink.wait_any`: a worker failed."""
        with self.changed:
            self.given_up = True
            self.changed.notify_all()


class _QueueLink(ArrivalLink):
    def __init__(self, worker: int, queues: WorkerQueues) -> None:
        self._worker = worker
        self._queues = queues
        self._lines = queues.lines

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        with self._queues.changed:
            self._lines.setdefault((self._worker, to), deque()).append((tag, array))
            self._queues.changed.notify_all()

    def has_room(self, to: int) -> bool:
        # As many as the verifier of instruction lists allows for.
        return not self._lines.get((self._worker, to))

    def ready(self, source: int) -> bool:
        return bool(self._lines.get((source, self._worker)))

    def wait_any(self, sources: Sequence[int]) -> int:
        queues = self._queues
        with queues.changed:
            queues.changed.wait_for(lambda: queues.given_up or any(map(self.ready, sources)))
            if queues.given_up:
                raise StepAbortedError(0)
            return next(filter(self.ready, sources))

    def next_tag(self, source: int) -> int:
        return self._lines[source, self._worker][0][0]

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        came, array = self._lines[source, self._worker].popleft()
        check_tag(source, tag, came)
        return array if sharding is None else jax.device_put(array, sharding)


def check_tag(source: int, wanted: int, came: int) -> None:
    """ScheduleError where something else came than what the list says."""
    if came != wanted:
        raise ScheduleError(f"worker {source} sent tag {came} where tag {wanted} was to come")
