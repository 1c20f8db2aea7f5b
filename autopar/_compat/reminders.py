"""Calls from time to time while something takes long: `reminders` of a log, `timer` of a line that changes.

Commands and the functions of a step both remind so; nothing here writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds after which a line appears, and between the changes of one that changes.
AFTER_S, EVERY_S = 2.0, 0.5


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
