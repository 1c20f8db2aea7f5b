"""Calls from time to time while something takes long: `reminders` of a log, `timer` of a line that changes.

Commands and the functions of a step both remind so; nothing here writes. `ACTIVITY` is what the process does in any
phase, as compiling a loop when it first runs: a reminder names it in place of the phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: Seconds after which a line appears, and between the changes of one that changes.
AFTER_S, EVERY_S = 2.0, 0.5


class Activity:
    """Work of this process that begins by itself in the middle of a phase; one may begin inside of another."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def begin(self, text: str) -> None:
        """Work begins; ``text`` says what it is."""
        self._texts.append(text)

    def end(self) -> None:
        """The work that began last is over."""
        self._texts.pop()

    def or_phase(self, phase: str) -> str:
        """Text of the work that runs, or of the phase where none does."""
        return next(reversed(self._texts), phase)


ACTIVITY: Final = Activity()


@contextmanager
def reminders(say: Callable[[float], None], after_s: float) -> Iterator[None]:
    """Calls of ``say`` with the seconds since the beginning: after ``after_s``, then whenever twice as much passed."""

    def doubled(passed_s: float) -> float:
        say(passed_s)
        return passed_s

    with timer(doubled, after_s):
        yield


@contextmanager
def timer(call: Callable[[float], float], wait_s: float) -> Iterator[None]:
    """Calls of ``call`` with the seconds since the beginning; each returns the seconds until the next."""
    over = threading.Event()

    def run() -> None:
        began, next_s = time.monotonic(), wait_s
        while not over.wait(next_s):
            next_s = call(time.monotonic() - began)

    thread = threading.Thread(target=run, name="autopar progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
