"""A second process that plans too, so that two cores are used.

`WorkerPool` takes calls whose answers are wanted later, and computes them here where the other process has not begun
them; `Process` is the other process seen from here, `autopar.search.worker` the program that runs in it. Answers do not
depend on where they were computed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from autopar.errors import AutoparError
from autopar.search.store import Store
from autopar.solver.meter import Meter

#: Run by the other process: it finds modules where this one does.
_START = "import sys; sys.path[:] = {path!r}; from autopar.search.worker import main; main({descriptor})"


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


def start_worker() -> Process | None:
    """A process for a second core; None where there is one core."""
    return Process.start() if cores() > 1 and sys.executable else None


Argument = TypeVar("Argument")
Result = TypeVar("Result")


def metered(argument: Argument, meter: Meter, store: Store | None = None) -> Argument:
    """A problem whose work is counted by a meter, with the answers of a store; anything else as it is."""
    if not isinstance(argument, _Counted):
        return argument
    counted: Any = argument
    return cast(Argument, replace(counted, meter=meter, store=store or argument.store))


@runtime_checkable
class _Counted(Protocol):
    """A problem: its work is counted, and it has the answers of its search."""

    meter: Meter
    store: Store


@dataclass(eq=False)
class Future(Generic[Result]):
    """A call whose answer is wanted later.

    Args:
        function, args: the call. It has no effect but its answer, and may raise.
        others: futures that nobody may have taken yet.
        guard: held while who makes the call is decided.
        taken: whether somebody makes it.
        done: set when there is an outcome.
        outcome: the function's answer, or an exception to raise; `NoAnswerError` where it has none.
        meter: counts what the call takes.
    """

    function: Callable[..., Result]
    args: tuple[Any, ...]
    others: deque[Future[Any]]
    guard: threading.Lock = field(default_factory=threading.Lock)
    taken: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Any = None
    meter: Meter = field(default_factory=Meter)

    def take(self) -> bool:
        """Whether the caller is the first to take the call, and has to make it."""
        with self.guard:
            first, self.taken = not self.taken, True
        return first

    def result(self, meter: Meter | None = None) -> Result:
        """The answer, or what the call raises. It is made here unless the other process has begun it.

        While that has not ended, calls of other futures are made here.

        Args:
            meter: counts what the call takes: of calls whose answer nobody asks for, nothing is counted.
        """
        if self.take():
            self.make()
        while not self.done.is_set():
            try:
                other = self.others.popleft()
            except IndexError:
                self.done.wait()
            else:
                if other.take():
                    other.make()
        if isinstance(self.outcome, NoAnswerError):
            self.make()
        if meter is not None:
            meter.merge(self.meter)
            self.meter = Meter()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        answer: Result = self.outcome
        return answer

    def make(self) -> None:
        """Makes the call here."""
        self.meter = Meter()
        try:
            self.outcome = self.function(*(metered(a, self.meter) for a in self.args))
        except Exception as error:
            self.outcome = error
        self.done.set()


@dataclass(eq=False)
class WorkerPool:
    """Makes futures. The last one made is the first that the other process takes: this one takes the first.

    Args:
        process: the other process; None where there is none, so that all is computed here.
        may_begin: whether a process is started where work is worthwhile for one: a search has one for all its regions.
        open: futures that nobody may have taken yet.
        wanted: tells the thread that serves the process that there is something to do.
        thread: serves the process; None until something is submitted.
        closing: whether the process is being ended.
    """

    process: Process | None = None
    may_begin: bool = False
    open: deque[Future[Any]] = field(default_factory=deque)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    closing: bool = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Starts the other process, where there is none yet and one may be started."""
        if self.may_begin and self.process is None:
            self.process, self.may_begin = start_worker(), False

    def forget(self) -> None:
        """Leaves calls to this process that the other one has not begun: nobody may want their answers."""
        self.open.clear()

    def submit(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """A call whose answer is wanted later.

        Args:
            function: of a module of autopar, without effects.
            args: what it is called with; they can be pickled.
        """
        future = Future(function, args, self.open)
        if self.process is not None:
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, args=(self.process,), daemon=True)
                self.thread.start()
            self.open.append(future)
            self.wanted.release()
        return future

    def close(self) -> None:
        """Ends the other process; what it has not answered is computed here where it is asked for."""
        if self.process is None:
            return
        self.closing = True
        self.process.close()
        self.wanted.release()
        if self.thread is not None:
            self.thread.join()
        self.process, self.thread = None, None

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[()]]:
        """The other process begins none."""
        return WorkerPool, ()

    def _serve(self, process: Process) -> None:
        while True:
            self.wanted.acquire()
            try:
                future = self.open.pop()
            except IndexError:  # this process has made it meanwhile, or the pool is closed
                if self.closing:
                    return
                continue
            if future.take():
                future.outcome, future.meter = process.call(future.function, future.args)
                future.done.set()


#: Where there is no other process.
SERIAL = WorkerPool()
