"""`autopar.initialize`: joins the processes of one script, with errors that Python can catch; notices of their end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from autopar._compat.world import use_gloo, world
from autopar.errors import ClusterError, ProcessLostError
from autopar.runtime.hosts.service import start_service, why_ended
from autopar.runtime.hosts.supervise import COORDINATOR, CPU_DEVICES, PROCESS, PROCESSES
from autopar.runtime.hosts.watch import heartbeat_s, watch

#: jax looks for the others so much longer than this process waits: where it gives up it ends the process.
_LATER_S = 60
_LOOPBACK = ("127.0.0.1", "localhost")
#: Seconds that the others are waited for.
_JOIN_S = 120.0
_POLL_S = 0.2
#: Where process 0 binds the service that jax starts in it, which nobody uses.
_UNUSED = "127.0.0.1:0"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    join_s: float = _JOIN_S,
    **options: Any,
) -> None:
    """Joins this process to the others that run the same script: `jax.distributed.initialize` with typed errors.

    Called before jax has devices. What is not given is taken from `autopar run`, else found by jax itself (SLURM, Cloud
    TPU, Open MPI, Kubernetes); where there is nothing to be found the process stays alone. A script may call
    `jax.distributed.initialize` itself instead: then jax ends processes of which one is missing.

    Args:
        coordinator: host and port at which process 0 listens.
        processes: how many there are.
        process: number of this one.
        join_s: seconds that the others are waited for.
        options: of `jax.distributed.initialize`.

    Raises:
        ProcessLostError: a process did not come in time.
        ClusterError: what is given is not enough.
    """
    coordinator = coordinator or os.environ.get(COORDINATOR)
    processes = _number(PROCESSES) if processes is None else processes
    process = _number(PROCESS) if process is None else process
    devices = _number(CPU_DEVICES)
    if devices is not None:
        jax.config.update("jax_num_cpu_devices", devices)
    if processes == 1:
        return
    given: dict[str, Any] = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
    if all(v is not None for v in given.values()):
        options.setdefault("cluster_detection_method", "deactivate")
        host = str(coordinator).rpartition(":")[0]
        if host in _LOOPBACK:
            options.setdefault("coordinator_bind_address", coordinator)
            use_gloo(host)
    elif any(v is not None for v in given.values()) and processes is not None and coordinator is None:
        raise ClusterError(f"{processes} processes and no coordinator", remedy='coordinator="host:port" of process 0')
    options.setdefault("heartbeat_timeout_seconds", math.ceil(1.5 * heartbeat_s()) + 5)
    options.setdefault("initialization_timeout", math.ceil(join_s) + _LATER_S)
    service = None
    if process == 0 and coordinator is not None and processes is not None:
        port = coordinator.rpartition(":")[2]
        address = options.get("coordinator_bind_address") or f"[::]:{port}"
        options["coordinator_bind_address"] = _UNUSED
        service = start_service(address, processes, options["heartbeat_timeout_seconds"], heartbeat_s())
    reached = _Join(given, options, join_s).run(service)
    if not reached:
        return  # nothing says that there are others
    joined_world = world()
    if joined_world is not None:
        watch(joined_world)


@dataclass(frozen=True)
class _Join:
    """A call of `jax.distributed.initialize` that this process waits for itself.

    Args:
        given: coordinator, number of processes and of this one, as far as they are known.
        options: of jax.
        limit_s: seconds that the others are waited for.
    """

    given: Mapping[str, Any]
    options: Mapping[str, Any]
    limit_s: float

    def run(self, service: subprocess.Popen[bytes] | None) -> bool:
        """Whether there are other processes, which came; typed errors where some are missing.

        Args:
            service: the coordination service of this process, if it has it.
        """
        failed: list[BaseException] = []
        # jax ends the process where the others do not come: a thread waits, so that this one can say so first.
        thread = threading.Thread(target=self._initialize, args=(failed,), name="autopar-join", daemon=True)
        thread.start()
        coordinator = self.given["coordinator_address"]
        until = time.monotonic() + self.limit_s
        while thread.is_alive() and time.monotonic() < until:
            thread.join(_POLL_S)
            reason = why_ended(service) if service is not None else None
            if reason is not None:
                raise ClusterError(
                    f"no coordination service at {coordinator}: {reason}",
                    cause="the port is taken, or the address is another machine's",
                    remedy="give an address of process 0's machine with a free port",
                )
        if thread.is_alive():
            raise ProcessLostError(
                f"not all {self.given['num_processes'] or ''} processes came to {coordinator or 'the coordinator'} "
                f"within {self.limit_s:g} s",
                cause="one was not started or ended before it came here, or the address is not process 0's",
                remedy="look at the output of all processes; join_s= gives them more time",
            )
        if failed:
            if isinstance(failed[0], ValueError) and all(v is None for v in self.given.values()):
                return False
            raise ClusterError(f"jax cannot join the processes: {failed[0]}") from failed[0]
        return True

    def _initialize(self, failed: list[BaseException]) -> None:
        try:
            jax.distributed.initialize(**self.given, **self.options)
        except BaseException as error:
            failed.append(error)


def stopping(at: int) -> bool:
    """Whether this process, or another of its world, was told to end (SIGTERM): save, and exit with `autopar.AGAIN`.

    True on all processes at the same step. Called once a step by all of them; of one process the first call begins to
    listen.

    Args:
        at: number of the step.
    """
    if world() is not None:
        return bool(multihost_utils.reached_preemption_sync_point(at))
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Notice):
        handler = _Notice()
        signal.signal(signal.SIGTERM, handler)
    return handler.given


class _Notice:
    """A handler of SIGTERM that remembers it."""

    def __init__(self) -> None:
        self.given = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.given = True


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdigit():
        raise ClusterError(f"{variable}={text!r} is no number")
    return int(text)
