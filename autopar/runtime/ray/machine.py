"""Processes of this machine: which machine it is, how to end one for sure, a guard for when the driver is killed.

`on_sigterm` serves workers whose machine is taken away: the driver is notified, and the process ends a while later.
Signals run Python code in the main thread only, which is inside of Ray for as long as the process lives. What Python's
handler does at once, whatever thread runs, is to write the number of the signal into a pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

#: Exit status of a process that SIGTERM ended.
EXIT_STATUS = 128 + signal.SIGTERM
#: Seconds that a driver has to save what is on a worker that is to end; Kubernetes kills after 30.
GRACE_S = 25.0


def machine() -> str:
    """The same text in all processes that see each other by their ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


#: Variables that all processes of a worker_group have, and all processes of a Ray that was started here.
GROUP_MARK, RAY_MARK = "AUTOPAR_GROUP", "AUTOPAR_RAY"


def marked(mark: str) -> list[int]:
    """Ids of the processes of this machine that were started with a variable; none without /proc.

    Finds processes that have not said a word yet, too.

    Args:
        mark: as ``NAME=value``.
    """
    wanted = mark.encode()
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and exists(int(name)):
                    pids.append(int(name))
    return sorted(pids)


def titled(folder: str, title: str = "ray::") -> list[int]:
    """Ids of the processes of this machine with a title that have a file open in a folder; none without /proc.

    A process that gives itself a title writes it over its environment, and with it the mark that `marked` looks for.

    Args:
        folder: absolute path without links.
        title: what the title begins with.
    """
    inside = os.path.join(folder, "")
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    is_titled = file.read().startswith(title.encode())
                if is_titled and any(_target(name, fd).startswith(inside) for fd in os.listdir(f"/proc/{name}/fd")):
                    pids.append(int(name))
    return sorted(pids)


def _target(process: str, fd: str) -> str:
    with contextlib.suppress(OSError):  # it was closed in the meantime
        return os.readlink(f"/proc/{process}/fd/{fd}")
    return ""


def end_process(process: int, polite_s: float = 0.0, seconds: float = 10) -> None:
    """Ends a process of this machine, a stopped one too, and waits until it is gone.

    Args:
        process: its id.
        polite_s: seconds that it has to end by itself, if it is not stopped.
        seconds: how long to wait for its end at most.
    """
    _wait(process, polite_s, "TZ")
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    _wait(process, seconds, "Z")


def _wait(process: int, seconds: float, ends: str) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and _state(process) not in ends:
        time.sleep(0.005)


def exists(process: int) -> bool:
    """Whether a process of this machine runs or is stopped; one that only waits to be reaped does not."""
    return _state(process) != "Z"


def _state(process: int) -> str:
    """The state of a process as /proc has it: "T" stopped, "Z" gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return "Z"
    except ProcessLookupError:
        return "Z"
    try:  # a system without /proc
        os.kill(process, 0)
    except ProcessLookupError:
        return "Z"
    return "R"


def guard(mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Starts a process that waits for the end of this one, and then ends what this one left.

    Args:
        mark: of the processes that are ended, as ``NAME=value``.
        folder: is removed.
    """
    command = [sys.executable, "-I", os.path.abspath(__file__), mark, folder]
    # A session of its own: Ctrl-C in a terminal goes to all processes of the driver's.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def clean_up(mark: str, folder: str) -> None:
    """Ends the processes that have a mark, and Ray's in a folder, and removes it; others may still write there."""
    until = time.monotonic() + 10
    real = os.path.realpath(folder)
    while time.monotonic() < until and (left := [*marked(mark), *titled(real)]):
        for process in left:
            end_process(process, 0.0)
    while os.path.exists(folder) and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


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


if __name__ == "__main__":
    sys.stdin.read()  # ends with the driver, whose end of the pipe it is
    clean_up(sys.argv[1], sys.argv[2])
