"""`WorkerWatch`: looks after workers while nobody calls them: what is lost then is reported at once."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from autopar.runtime.ray.beacon import HEARTBEAT_S
from autopar.runtime.ray.logs import record
from autopar.runtime.ray.metrics import Metrics
from autopar.runtime.ray.session import Session

#: Heartbeats that may be missed before a process counts as not heard of.
_MISSED = 3


class WorkerWatch:
    """A thread that logs worker processes that ended, fell silent or were told to end, and counts the others.

    Args:
        owner: the driver; the thread ends with it.
        session: gives the owner's current session of workers, or None.
        metrics: the gauges that the thread sets.
        every_s: seconds between two checks.
    """

    def __init__(
        self, owner: Any, session: Callable[[Any], Session | None], metrics: Metrics, every_s: float = HEARTBEAT_S
    ) -> None:
        self._owner = weakref.ref(owner)
        self._session = session
        self._metrics = metrics
        self._every_s = every_s
        self._over = threading.Event()
        self._seen: tuple[Session | None, set[tuple[str, int]]] = (None, set())
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            owner = self._owner()
            if owner is None:
                return
            self.look(self._session(owner))
            del owner

    def look(self, session: Session | None) -> None:
        """Tells of processes that ended, that are to end, or of which nothing is heard, each once."""
        if session is None:
            self._metrics.processes.set(0)
            return
        if self._seen[0] is not session:
            self._seen = (session, set())
        monitor, count = session.monitor, session.groups.num_processes
        gone, silent = monitor.gone(), monitor.silent(_MISSED * self._every_s)
        self._metrics.processes.set(count - len({*gone, *silent}))
        for event, processes, text in (
            ("worker gone", gone, "ended"),
            ("worker silent", silent, f"was not heard of for {_MISSED * self._every_s:g} s"),
            ("worker ending", monitor.ending(), "was asked to end (SIGTERM)"),
        ):
            for process in processes:
                if (event, process) not in self._seen[1]:
                    self._seen[1].add((event, process))
                    worker = session.groups.workers[process]
                    text_of = f"process {process} of worker {worker} {text}"
                    record(event, text_of, logging.WARNING, process=process, worker=worker)
