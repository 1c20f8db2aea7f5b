"""Processes of one script on this machine, started again together when one of them ends. Knows no jax."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

#: Variables by which `autopar.initialize` finds the others.
COORDINATOR, PROCESSES, PROCESS = "AUTOPAR_COORDINATOR", "AUTOPAR_PROCESSES", "AUTOPAR_PROCESS"
CPU_DEVICES = "AUTOPAR_CPU_DEVICES"
#: Exit code of a process that saved because it was told to end, and is to be started again.
AGAIN = 75
_POLL_S = 0.05
#: A shell that reads numbers of process groups, and kills them when the process that writes them is gone.
_GUARD = 'while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups'
#: A shell that becomes a command when it may, and ends where the process that would say so is gone.
_HELD = 'read -r _ < "$0" && exec "$@"'


@dataclass(frozen=True)
class SupervisedJob:
    """A job to supervise.

    Args:
        command: of each process.
        processes: how many.
        least: with how many it is started again at least; below ``processes`` each start has one less.
        restarts: how often it is started again at most.
        heartbeat_s: seconds that the others have to end by themselves when one did.
        cpu_devices: virtual devices of each process; None leaves that to the script.
        grace_s: seconds beyond ``heartbeat_s`` in which the others may end.
    """

    command: tuple[str, ...]
    processes: int
    least: int
    restarts: int
    heartbeat_s: float
    cpu_devices: int | None = None
    grace_s: float = 10.0


class _Guard:
    """Ends process groups when this process is gone, even by SIGKILL, which leaves it no time to do so."""

    def __enter__(self) -> _Guard:
        self.shell = subprocess.Popen(
            ("/bin/sh", "-c", _GUARD),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C does not reach it
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.shell.kill()
        self.shell.communicate()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process in a group of its own, which ends with this one; its command begins once its group is known."""
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"there is no command {command[0]}")
        held, release = os.pipe()
        try:
            child = subprocess.Popen(
                ("/bin/sh", "-c", _HELD, f"/dev/fd/{held}", *command),
                env=environment,
                process_group=0,
                pass_fds=(held,),
            )
            if self.shell.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # somebody ended the shell
                    self.shell.stdin.write(f"{child.pid}\n".encode())
                    self.shell.stdin.flush()
            os.write(release, b"\n")
        finally:
            os.close(held)
            os.close(release)
        return child


class _Signals:
    """A signal handler that remembers."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number


def supervise(job: SupervisedJob, say: Callable[[str], None]) -> int:
    """Runs a job to its end; returns the exit code: 0, or that of the process that ended it.

    Args:
        job: what is to run.
        say: called with a line when something happens.
    """
    signals = _Signals()
    before = {n: signal.signal(n, signals) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        count = job.processes
        for attempt in range(job.restarts + 1):
            code = _once(job, count, signals, say)
            if code == 0 or signals.number is not None:
                return code
            if attempt == job.restarts:
                say(f"ended with {code} after {job.restarts} restarts")
                return code
            if code != AGAIN and count > job.least:
                count -= 1
            say(f"starting {count} process{'es' * (count > 1)} again ({attempt + 1} of {job.restarts})")
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _once(job: SupervisedJob, count: int, signals: _Signals, say: Callable[[str], None]) -> int:
    address = f"127.0.0.1:{_free_port()}"
    started: list[subprocess.Popen[bytes]] = []
    with _Guard() as guard:
        try:
            for process in range(count):
                environment = _environment(job, address, count, process)
                started.append(guard.start(job.command, environment))
                say(f"process {process}: pid {started[-1].pid}")
            return _follow(job, started, signals, say)
        finally:
            for child in started:
                _end_group(child)
            for child in started:
                child.wait()


def _follow(
    job: SupervisedJob, started: Sequence[subprocess.Popen[bytes]], signals: _Signals, say: Callable[[str], None]
) -> int:
    """Waits for processes that were started: the exit code of the first that did not end in order, else 0."""
    code, until, passed_on = 0, float("inf"), False
    left = dict(enumerate(started))
    while left and time.monotonic() < until:
        for process, child in list(left.items()):
            ended = child.poll()
            if ended is None:
                continue
            del left[process]
            if ended:
                say(f"process {process} ended with {_named(ended)}")
                if code in (0, AGAIN):
                    code = ended if ended > 0 else 128 - ended
                until = min(until, time.monotonic() + job.heartbeat_s + job.grace_s)
        if signals.number is not None and not passed_on:
            passed_on = True
            for child in left.values():
                child.send_signal(signal.SIGTERM)
            until = min(until, time.monotonic() + job.heartbeat_s + job.grace_s)
        time.sleep(_POLL_S)
    for process in left:
        say(f"process {process} is ended: it waited for one that is gone")
    if signals.number is not None:
        return code or 128 + signals.number
    return code or (1 if left else 0)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, whether it ended already or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _named(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _environment(job: SupervisedJob, address: str, count: int, process: int) -> dict[str, str]:
    environment = {**os.environ, COORDINATOR: address, PROCESSES: str(count), PROCESS: str(process)}
    environment["AUTOPAR_HEARTBEAT_S"] = f"{job.heartbeat_s:g}"
    if job.cpu_devices is not None:
        environment |= {CPU_DEVICES: str(job.cpu_devices), "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
    return environment


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
