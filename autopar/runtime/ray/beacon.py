"""Where every process is: it reports the instruction that it is at, the driver remembers the last report.

One that was killed or stopped cannot be asked; what it reported last tells what it was doing. The end of its
connection tells at once that the process is gone.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from types import TracebackType

from autopar.runtime.transport.frames import read_exactly
from autopar.runtime.transport.sockets import shut

_REPORT = struct.Struct("<iii")


class Beacon:
    """The worker's end.

    Args:
        monitor: host and port of the driver's end.
        secret: what the connection begins with.
        process: number of the process.
    """

    def __init__(self, monitor: tuple[str, int], secret: bytes, process: int) -> None:
        self._process = process
        self._connection = socket.create_connection(monitor, timeout=20)
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(secret + _REPORT.pack(process, -1, -1))

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
        secret: what every connection begins with.
        host: address to listen on.
    """

    def __init__(self, secret: bytes, host: str = "127.0.0.1") -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._last: dict[int, tuple[int, int]] = {}
        self._gone: dict[int, None] = {}
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="monitor", daemon=True).start()

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
        shut(self._listener)
        with self._lock:
            for connection in self._connections:
                shut(connection)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.append(connection)
            threading.Thread(target=self._read, args=(connection,), name="reports", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        process = -1
        try:
            if not hmac.compare_digest(bytes(read_exactly(connection, len(self._secret))), self._secret):
                shut(connection)
                return
            while True:
                process, step, index = _REPORT.unpack(read_exactly(connection, _REPORT.size))
                with self._lock:
                    self._last[process] = (step, index)
        except (OSError, EOFError):
            if process >= 0:
                with self._lock:
                    self._gone[process] = None
