"""`WorkerGroup`: the processes of a pipeline's workers, and calls to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from autopar.runtime.ray.host import WorkerHost
from autopar.runtime.ray.messages import Handshake, encode


@dataclass(frozen=True)
class Answer:
    """What came of a call.

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


class ThreadWorkerGroup(WorkerGroup):
    """Workers as threads of this process, each on its own part of the process's devices; for tests and debugging.

    Args:
        handshakes: one for each worker.
    """

    def __init__(self, handshakes: Sequence[Handshake]) -> None:
        self._hosts = [WorkerHost(encode(h)) for h in handshakes]
        self._threads = [ThreadPoolExecutor(4, f"worker-{h.process}") for h in handshakes]

    def call(self, process: int, method: str, *args: Any) -> Future[Any]:
        """See `WorkerGroup.call`."""
        return self._threads[process].submit(self._hosts[process].call, method, *args)

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> dict[int, Answer]:
        """See `WorkerGroup.wait`."""
        done, _ = wait(tickets, timeout_s)
        return {i: _answer(t) for i, t in enumerate(tickets) if t in done}

    def kill(self) -> None:
        """Closes the connections, which ends what waits for them."""
        for host in self._hosts:
            host.close()
        for thread in self._threads:
            thread.shutdown(wait=True)


def _answer(future: Future[Any]) -> Answer:
    error = future.exception()
    return Answer(future.result()) if error is None else Answer(error=f"{type(error).__name__}: {error}")
