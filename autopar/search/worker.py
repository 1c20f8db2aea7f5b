"""Program of the worker process: calls from a connection, answers to it, until it ends."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from pickle import PickleError

import autopar.search  # noqa: F401 -- loaded while the other process is still tracing
from autopar.search.garbage import rare_collections
from autopar.search.store import Store
from autopar.search.worker_pool import NoAnswerError, metered
from autopar.solver.meter import Meter


def main(descriptor: int) -> None:
    """Serves a planner in another process: receives (function, arguments) and sends results, until the connection ends.

    Args:
        descriptor: file descriptor of this process's end of the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    connection, store = Connection(descriptor), Store()
    with rare_collections():
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                return
            meter = Meter()
            try:
                answer = function(*(metered(a, meter, store) for a in args))
            except Exception as error:
                answer = error
            try:
                connection.send((answer, meter.counts, meter.kept))
            except BrokenPipeError:
                return
            except (TypeError, AttributeError, PickleError) as error:
                connection.send((NoAnswerError(f"the answer cannot be sent: {error}"), {}, {}))
