"""Workers in one process: arrays change hands, and `jax.device_put` moves them between meshes."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.errors import ScheduleError
from autopar.runtime.transport.base import WorkerLink


class WorkerQueues:
    """The queues between all workers of a process."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], deque[tuple[int, Any]]] = {}

    def link(self, worker: int) -> WorkerLink:
        """The connections of one worker."""
        return _QueueLink(worker, self._lines)


class _QueueLink(WorkerLink):
    def __init__(self, worker: int, lines: dict[tuple[int, int], deque[tuple[int, Any]]]) -> None:
        self._worker = worker
        self._lines = lines

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        self._lines.setdefault((self._worker, to), deque()).append((tag, array))

    def has_room(self, to: int) -> bool:
        # As many as the verifier of instruction lists allows for.
        return not self._lines.get((self._worker, to))

    def ready(self, source: int) -> bool:
        return bool(self._lines.get((source, self._worker)))

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        came, array = self._lines[source, self._worker].popleft()
        check_tag(source, tag, came)
        return array if sharding is None else jax.device_put(array, sharding)


def check_tag(source: int, wanted: int, came: int) -> None:
    """ScheduleError where something else came than what the list says."""
    if came != wanted:
        raise ScheduleError(f"worker {source} sent tag {came} where tag {wanted} was to come")
