"""SIGTERM to a worker, as before its machine is taken away: the driver is told, and the process ends a while later.

Signals run Python code in the main thread only, which is inside of Ray for as long as the process lives. What Python's
handler does at once, whatever thread runs, is to write the number of the signal into a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

#: Exit status of a process that SIGTERM ended.
EXIT_STATUS = 128 + signal.SIGTERM
#: Seconds that a driver has to save what is on a worker that is to end; Kubernetes kills after 30.
GRACE_S = 25.0


def on_sigterm(ask: Callable[[], None]) -> bool:
    """Makes SIGTERM to this process call ``ask`` in a thread of its own, once.

    Returns whether it could be arranged, which takes the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Also takes the place of the handler that prints a trace and aborts.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGTERM:
                ask()
                return

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    return True
