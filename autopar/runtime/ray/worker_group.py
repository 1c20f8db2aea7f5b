"""`WorkerGroup`: the processes of a pipeline's workers, and calls to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Result of a call.

    Args:
        value: what it returned.
        error: why it returned nothing; empty where it did.
        lost: whether the process is gone; else it raised the error, and lives.
    """

    value: Any = None
    error: str = ""
    lost: bool = False


class WorkerGroup(ABC):
    """Processes 0, 1, ... of one life of a pipeline; after a failure another worker_group takes their place."""

    @abstractmethod
    def call(self, process: int, method: str, *args: Any) -> Any:
        """Begins a call of a method of a `WorkerHost`; returns a ticket for `wait`. Two may run at the same time."""

    @abstractmethod
    def wait(self, tickets: Sequence[Any], timeout_s: float) -> dict[int, Answer]:
        """Answers that are there, by position in ``tickets``; waits until all are, or the time is over."""

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of those processes that are on this machine."""
        return ()

    @property
    def has_lines(self) -> bool:
        """Whether steps may go to the processes over connections instead (`StepLines`)."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """Ends all processes at once, whatever they do. Returns when they are gone."""
