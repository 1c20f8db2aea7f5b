"""`WorkerPool`: calls whose answers are wanted later, made in another process as far as it gets."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from autopar.search.parallel.process import NoAnswerError, Process
from autopar.search.problem import Problem
from autopar.search.store import Store
from autopar.solver.meter import Meter

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def metered(argument: Argument, meter: Meter, store: Store | None = None) -> Argument:
    """A problem whose work is counted by a meter, with the answers of a store; anything else as it is."""
    if not isinstance(argument, Problem):
        return argument
    return replace(argument, meter=meter, store=store or argument.store)


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
        open: futures that nobody may have taken yet.
        wanted: tells the thread that serves the process that there is something to do.
        thread: serves the process; None until something is submitted.
        closing: whether the process is being ended.
    """

    process: Process | None = None
    open: deque[Future[Any]] = field(default_factory=deque)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    closing: bool = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
