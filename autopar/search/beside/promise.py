"""`Beside`: calls whose answers are wanted later, made in another process as far as it gets."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from autopar.search.beside.process import Process, Refused

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Promise(Generic[Answer]):
    """A call whose answer is wanted later.

    Args:
        function, args: the call. It has no effect but its answer, and may raise.
        others: promises that nobody may have taken yet.
        guard: held while who makes the call is decided.
        taken: whether somebody makes it.
        done: set when there is an outcome.
        outcome: the function's answer, or an exception to raise; `Refused` where it has none.
    """

    function: Callable[..., Answer]
    args: tuple[Any, ...]
    others: deque[Promise[Any]]
    guard: threading.Lock = field(default_factory=threading.Lock)
    taken: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Any = None

    def take(self) -> bool:
        """Whether the caller is the first to take the call, and has to make it."""
        with self.guard:
            first, self.taken = not self.taken, True
        return first

    def result(self) -> Answer:
        """The answer, or what the call raises. It is made here unless the other process has begun it.

        While that has not ended, calls of other promises are made here.
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
        if isinstance(self.outcome, Refused):
            self.make()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        answer: Answer = self.outcome
        return answer

    def make(self) -> None:
        """Makes the call here."""
        try:
            self.outcome = self.function(*self.args)
        except Exception as error:
            self.outcome = error
        self.done.set()


@dataclass(eq=False)
class Beside:
    """Makes promises. The last one made is the first that the other process takes: this one takes the first.

    Args:
        process: the other process; None where there is none, so that all is computed here.
        open: promises that nobody may have taken yet.
        wanted: tells the thread that serves the process that there is something to do.
    """

    process: Process | None = None
    open: deque[Promise[Any]] = field(default_factory=deque)
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def promise(self, function: Callable[..., Answer], *args: Any) -> Promise[Answer]:
        """A call whose answer is wanted later.

        Args:
            function: of a module of autopar, without effects.
            args: what it is called with; they can be pickled.
        """
        made = Promise(function, args, self.open)
        if self.process is not None:
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, args=(self.process,), daemon=True)
                self.thread.start()
            self.open.append(made)
            self.wanted.release()
        return made

    def close(self) -> None:
        """Ends the other process; what it has not answered is computed here where it is asked for."""
        if self.process is None:
            return
        self.process.close()
        self.wanted.release()
        if self.thread is not None:
            self.thread.join()
        self.process, self.thread = None, None

    def _serve(self, process: Process) -> None:
        while True:
            self.wanted.acquire()
            try:
                promise = self.open.pop()
            except IndexError:  # closed
                return
            if promise.take():
                promise.outcome = process.call(promise.function, promise.args)
                promise.done.set()


#: Where there is no other process.
ALONE = Beside()
