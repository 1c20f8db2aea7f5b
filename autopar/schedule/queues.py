"""`Queues`: values on their way between workers, for what follows instruction lists without running them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Generic, TypeVar

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
        """Puts a value behind the others."""
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
