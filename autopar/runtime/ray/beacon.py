"""Where every process is: it reports the instruction that it is at, the driver remembers the last report.

One that was killed or stopped cannot be asked; what it reported last tells what it was doing. The end of its
connection tells at once that the process is gone.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType

from autopar.runtime.transport.channels import Credentials, Listener, dial, shut
from autopar.runtime.transport.frames import read_exactly

_REPORT = struct.Struct("<iii")


class Beacon:
    """The worker's end.

    Args:
        monitor: host and port of the driver's end.
        credentials: what the connection begins with.
        process: number of the process.
    """

    def __init__(self, monitor: tuple[str, int], credentials: Credentials, process: int) -> None:
        self._process = process
        self._connection = dial(monitor, credentials)
        self._connection.sendall(_REPORT.pack(process, -1, -1))

    def report(self, step: int, index: int) -> None:
        """Tells that the process is at an instruction of a step; without a driver it goes nowhere."""
        try:
            self._connection.sendall(_REPORT.pack(self._process, step, index))
        except OSError:
            return

    def close(self) -> None:
        """Ends the connection."""
        shut(self._connection)


class Monitor:
    """The driver's end.

    Args:
        credentials: what every connection begins with.
        host: address to listen on.
    """

    def __init__(self, credentials: Credentials, host: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._last: dict[int, tuple[int, int]] = {}
        self._gone: dict[int, None] = {}
        self._listener = Listener(credentials, self._read, host)
        self.address = self._listener.address

    def last(self, process: int) -> tuple[int, int]:
        """(step, index of the instruction) that a process reported last; -1 and -1 where it reported none."""
        with self._lock:
            return self._last.get(process, (-1, -1))

    def gone(self) -> tuple[int, ...]:
        """Processes that ended, the first one first."""
        with self._lock:
            return tuple(self._gone)

    def close(self) -> None:
        """Ends all connections."""
        self._listener.close()

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
                    self._last[process] = (step, index)
        except (OSError, EOFError):
            if process >= 0:
                with self._lock:
                    self._gone[process] = None
