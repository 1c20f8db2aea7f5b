"""Progress of every process: it reports its instruction, the driver remembers the last report.

One that was killed or stopped cannot be asked; what it reported last tells what it was doing. The end of its
connection tells at once that the process is gone, and heartbeats tell of one whose machine is gone or that is stopped.
Processes on the driver's machine report by memory that they share with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from types import TracebackType

from autopar.runtime.ray.machine import machine
from autopar.runtime.transport.channels import Credentials, Listener, dial, shut
from autopar.runtime.transport.frames import read_exactly

_REPORT = struct.Struct("<iii")
#: In place of a step: the process is alive; it was asked to end.
_ALIVE, _ENDING = -2, -3
#: Seconds between two heartbeats.
HEARTBEAT_S = 5.0


_ITEM_BYTES = 8
#: An entry is (step + 1) times this, and the index of the instruction + 1: one word, which is written at once.
_INDICES = 1 << 31


class Board:
    """Memory that the driver and the workers on its machine share: an entry for each process, of its instruction.

    A report there is one write into memory: neither side makes a system call, and the driver is not woken. What a
    process wrote last stays when it is killed. OSError where there is no such memory.

    Args:
        path: of the memory as another process of this machine sees it; empty makes it, with ``processes`` entries.
        processes: number of entries.
    """

    def __init__(self, path: str = "", processes: int = 0) -> None:
        if path:
            # Not waiting: something else may have this name where the driver is gone.
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            handle = os.memfd_create("autopar-board", os.MFD_CLOEXEC)
            os.ftruncate(handle, max(1, processes) * _ITEM_BYTES)
        #: What others of this machine and user open it by: "MACHINE PATH".
        self.name = f"{machine()} /proc/{os.getpid()}/fd/{handle}"
        self._file = os.fdopen(handle, "rb", buffering=0)
        try:
            self._entries = memoryview(mmap.mmap(handle, 0)).cast("q")
        except BaseException:
            self._file.close()
            raise

    def write(self, process: int, step: int, index: int) -> None:
        """Notes the instruction that a process is at."""
        self._entries[process] = (step + 1) * _INDICES + index + 1

    def read(self, process: int) -> tuple[int, int] | None:
        """(step, index) that a process noted last; None where it noted none."""
        entry = self._entries[process] if process < len(self._entries) else 0
        return (entry // _INDICES - 1, entry % _INDICES - 1) if entry else None

    def close(self) -> None:
        """Nobody opens it any more; those who have it go on to read and write."""
        self._file.close()


def made_board(processes: int) -> Board | None:
    """A board for processes; None where the system has no such memory."""
    with contextlib.suppress(OSError, AttributeError):
        return Board(processes=processes)
    return None


def opened_board(name: str) -> Board | None:
    """The board of a name; None where it is on another machine, or of another user."""
    where, _, path = name.rpartition(" ")
    if not path or where != machine():
        return None
    with contextlib.suppress(OSError, ValueError):
        board = Board(path)
        board.close()
        return board
    return None


class Beacon:
    """The worker's end.

    Args:
        monitor: host and port of the driver's end.
        credentials: what the connection begins with.
        process: number of the process.
        heartbeat_s: seconds between two heartbeats.
        board: name of the driver's `Board`; empty where it has none.
    """

    def __init__(
        self,
        monitor: tuple[str, int],
        credentials: Credentials,
        process: int,
        heartbeat_s: float = HEARTBEAT_S,
        board: str = "",
    ) -> None:
        self._process = process
        self._board = opened_board(board)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._connection = dial(monitor, credentials)
        self._send(-1, -1)
        threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True).start()

    def report(self, step: int, index: int) -> None:
        """Tells that the process is at an instruction of a step; without a driver it goes nowhere."""
        if self._board is not None:
            self._board.write(self._process, step, index)
        else:
            self._send(step, index)

    def _send(self, step: int, index: int) -> None:
        with contextlib.suppress(OSError), self._lock:
            self._connection.sendall(_REPORT.pack(self._process, step, index))

    def report_ending(self) -> None:
        """Tells that the process was asked to end."""
        self._send(_ENDING, -1)

    def wait(self, seconds: float) -> None:
        """Returns when the driver has ended the connection, or the time is over."""
        # Not by reading, which another thread must not do next to writing where the connection is encrypted.
        ended = select.poll()
        with contextlib.suppress(OSError, ValueError):
            ended.register(self._connection, select.POLLRDHUP)
            ended.poll(1000 * seconds)

    def close(self) -> None:
        """Ends the connection."""
        self._over.set()
        shut(self._connection)

    def _beat(self, heartbeat_s: float) -> None:
        while not self._over.wait(heartbeat_s):
            self._send(_ALIVE, -1)


class Monitor:
    """Driver's end of the connections over which workers report where they are.

    Args:
        credentials: what every connection begins with.
        host: address to listen on.
        processes: number of processes that may be on this machine.
    """

    def __init__(self, credentials: Credentials, host: str = "127.0.0.1", processes: int = 0) -> None:
        self._board = made_board(processes)
        self._lock = threading.Lock()
        self._last: dict[int, tuple[int, int]] = {}
        self._heard_s: dict[int, float] = {}
        self._gone: dict[int, None] = {}
        self._ending: dict[int, None] = {}
        self._listener = Listener(credentials, self._read, host)
        self.address = self._listener.address

    @property
    def board(self) -> str:
        """Name of the memory that processes of this machine report by; empty where there is none."""
        return "" if self._board is None else self._board.name

    def last(self, process: int) -> tuple[int, int]:
        """(step, index of the instruction) that a process reported last; -1 and -1 where it reported none."""
        noted = None if self._board is None else self._board.read(process)
        with self._lock:
            return noted or self._last.get(process, (-1, -1))

    def gone(self) -> tuple[int, ...]:
        """Processes that ended, the first one first."""
        with self._lock:
            return tuple(self._gone)

    def ending(self) -> tuple[int, ...]:
        """Processes that were asked to end."""
        with self._lock:
            return tuple(self._ending)

    def silent(self, seconds: float) -> tuple[int, ...]:
        """Processes of which nothing was heard for some seconds, the longest first."""
        until = time.monotonic() - seconds
        with self._lock:
            quiet = [(heard, p) for p, heard in self._heard_s.items() if heard < until and p not in self._gone]
        return tuple(p for _, p in sorted(quiet))

    def close(self) -> None:
        """Ends all connections."""
        self._listener.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self, connection: socket.socket) -> None:
        process = -1
        try:
            while True:
                process, step, index = _REPORT.unpack(read_exactly(connection, _REPORT.size))
                with self._lock:
                    self._heard_s[process] = time.monotonic()
                    if step == _ENDING:
                        self._ending[process] = None
                    elif step != _ALIVE:
                        self._last[process] = (step, index)
        except (OSError, EOFError):
            if process >= 0:
                with self._lock:
                    self._gone[process] = None
