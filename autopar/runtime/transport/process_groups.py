"""Workers of several processes: what one worker sends to another goes piece by piece between their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jax.sharding import NamedSharding

from autopar.runtime.transport.base import ArrivalLink
from autopar.runtime.transport.sockets import SocketLink
from autopar.runtime.transport.tiles import ShardLayout


@dataclass(frozen=True)
class ProcessGroups:
    """The processes of each worker: those of worker 0 come first.

    Args:
        sizes: for each worker the number of its processes.
    """

    sizes: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.sizes)

    @property
    def num_processes(self) -> int:
        """Number of processes of all workers."""
        return sum(self.sizes)

    def members(self, worker: int) -> range:
        """Numbers of a worker's processes."""
        first = sum(self.sizes[:worker])
        return range(first, first + self.sizes[worker])

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The worker of each process."""
        return tuple(w for w, size in enumerate(self.sizes) for _ in range(size))

    def rank(self, process: int) -> int:
        """Number of a process among those of its worker."""
        return process - self.members(self.workers[process]).start


class GroupLink(ArrivalLink):
    """One process's part of its worker's connections.

    Every process of the sender writes to every process of the receiver once for each array: those of its pieces that
    the devices there hold, perhaps none.

    Args:
        link: connections between processes.
        groups: the processes of all workers.
        layouts: by worker and name of a value how it lies there; a value that is not in it goes to each process whole.
    """

    def __init__(
        self, link: SocketLink, groups: ProcessGroups, layouts: Mapping[int, Mapping[str, ShardLayout]]
    ) -> None:
        self._link = link
        self._groups = groups
        self._layouts = layouts

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        """Sends a copy of an array; returns before it arrived, and keeps the array alive as long as it must."""
        layouts = self._layouts.get(to, {}).get(name) if self._groups.sizes[to] > 1 else None
        for rank, process in enumerate(self._groups.members(to)):
            boxes = None if layouts is None else partial(layouts.boxes, process=rank)
            self._link.send_shards(process, tag, array, boxes)

    def has_room(self, to: int) -> bool:
        """Whether another array may be sent before ``to`` took the last one."""
        return all(self._link.has_room(p) for p in self._groups.members(to))

    def ready(self, source: int) -> bool:
        """Whether `receive` would return, or fail, at once."""
        return all(self._link.ready(p) for p in self._groups.members(source))

    def wait_any(self, sources: Sequence[int]) -> int:
        """Waits until the first process of one of the sources has sent an array, or is lost; returns the source."""
        first = {self._groups.members(source).start: source for source in sources}
        return first[self._link.wait_any(list(first))]

    def next_tag(self, source: int) -> int:
        """The tag of the next array that the first process of ``source`` sent; waits, and fails, as `receive` does."""
        return self._link.next_tag(self._groups.members(source).start)

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        """The next array that ``source`` sent."""
        parts = [self._link.receive_shards(p, tag) for p in self._groups.members(source)]
        return self._link.laid(parts, sharding)
