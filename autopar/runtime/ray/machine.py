"""Processes of this machine: which machine it is, and how to end one for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time


def machine() -> str:
    """The same text in all processes that see each other by their ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


#: Variable that all processes of a crew have, with a value of their own.
MARK = "AUTOPAR_CREW"


def marked(mark: str) -> list[int]:
    """Ids of the processes of this machine that were started with `MARK` set to ``mark``; none without /proc.

    Finds processes that have not said a word yet, too.
    """
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and exists(int(name)):
                    found.append(int(name))
    return sorted(found)


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
