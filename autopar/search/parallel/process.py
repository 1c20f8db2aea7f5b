"""`Process`: another Python process that makes calls, seen from here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from autopar.errors import AutoparError
from autopar.solver.meter import Meter

#: Run by the other process: it finds modules where this one does.
_START = "import sys; sys.path[:] = {path!r}; from autopar.search.parallel.worker import main; main({descriptor})"


class NoAnswerError(AutoparError):
    """The other process has no answer: it is gone, or what it was asked cannot be sent there."""


@dataclass(eq=False)
class Process:
    """A process that makes one call at a time and ends when this one does.

    Args:
        child: the process.
        connection: takes calls and gives answers.
    """

    child: subprocess.Popen[bytes]
    connection: Connection[Any, Any]

    @staticmethod
    def start() -> Process | None:
        """A new process, which loads what planning needs meanwhile; None where the system gives none."""
        path = [os.path.abspath(p) for p in sys.path]
        try:
            near, far = Pipe()
        except OSError:
            return None
        with far:
            descriptor = far.fileno()
            start = _START.format(path=path, descriptor=descriptor)
            try:
                child = subprocess.Popen(
                    [sys.executable, "-c", start],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(descriptor,),
                )
            except OSError:
                near.close()
                return None
        return Process(child, near)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Meter]:
        """The result of the function in the other process, or its exception; `NoAnswerError` where none comes.

        With the meter of the call.

        Whatever keeps an answer from coming is none of the function's errors: who waits computes it here. Another
        thread may fill a cache of an argument while it is pickled, which ends with a `RuntimeError`.
        """
        try:
            self.connection.send((function, args))
            answer, counts, kept = self.connection.recv()
        except Exception as error:
            return NoAnswerError(f"no answer from the worker process: {error!r}"), Meter()
        return answer, Meter(counts, kept)

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self.child.kill()
        self.child.wait()
        self.connection.close()


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_worker(worthwhile: bool) -> Process | None:
    """A process for work that is ``worthwhile`` for a second core; None where it is not, or there is one core."""
    return Process.start() if worthwhile and cores() > 1 and sys.executable else None
