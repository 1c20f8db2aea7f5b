"""`WorkerLink`: what a worker sends arrays through and takes them from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

#: Seconds between two looks at what came.
POLL_S = 0.0002


class PeerLostError(Exception):
    """The connection to another worker broke; ``peer`` is its number."""

    def __init__(self, peer: int, reason: str) -> None:
        self.peer = peer
        super().__init__(f"worker {peer}: {reason}")


class SilentPeerError(Exception):
    """Another worker, ``peer``, sent nothing until the deadline."""

    def __init__(self, peer: int, waited_s: float) -> None:
        self.peer = peer
        super().__init__(f"worker {peer} sent nothing in {waited_s:.1f} s")


class StepAbortedError(Exception):
    """The step was given up, since another worker failed in it."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} was given up")


class WorkerLink(ABC):
    """One worker's connections. What one worker sends to another arrives in the order in which it was sent."""

    #: Bytes of arrays that this process moved by programs so far.
    moved_bytes: int = 0

    @abstractmethod
    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        """Sends a copy of an array; returns before it arrived, and keeps the array alive as long as it must.

        Args:
            to: worker that gets it.
            tag: what the receiver must ask for.
            array: a `jax.Array`.
            name: name of the value, by which it is known how the receiver lays it out.
        """

    @abstractmethod
    def has_room(self, to: int) -> bool:
        """Whether another array may be sent before ``to`` took the last one."""

    @abstractmethod
    def ready(self, source: int) -> bool:
        """Whether `receive` would return, or fail, at once."""

    def wait_any(self, sources: Sequence[int]) -> int:
        """Waits until `receive` of one of the sources would return, or fail; returns the source."""
        while True:
            for source in sources:
                if self.ready(source):
                    return source
            time.sleep(POLL_S)

    @abstractmethod
    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        """The next array that ``source`` sent.

        Args:
            source: worker that sends.
            tag: what it is sent as; anything else is a mistake of the instruction lists.
            sharding: how it is to lie; None leaves that open.

        Raises:
            PeerLostError: the connection broke.
            SilentPeerError: nothing came until the deadline.
            ScheduleError: something else came.
        """


class ArrivalLink(WorkerLink):
    """Connections of a worker that takes what has arrived, in whatever order others send it."""

    @abstractmethod
    def next_tag(self, source: int) -> int:
        """The tag of the next array that ``source`` sent; waits, and fails, as `receive` does."""
