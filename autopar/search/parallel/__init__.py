"""A second process that plans too, so that two cores are used.

`pool` says what may be computed there, and computes it here where the other process has not begun it; `process` is
the other process seen from here, `worker` what runs in it. Answers do not depend on where they were computed.
"""

from autopar.search.parallel.pool import SERIAL, Future, WorkerPool
from autopar.search.parallel.process import Process, start_worker

__all__ = ["SERIAL", "Future", "Process", "WorkerPool", "start_worker"]
