"""Connections between processes of one cluster: who may connect, and what those cost who may not.

A connection begins with a secret, behind TLS where the credentials have a certificate. Until the secret was read it has
a deadline, and there are a bounded number of such connections, of which the oldest gives way.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Seconds that a connection has to say the secret.
HANDSHAKE_S = 10.0
#: Connections that have not said it yet.
MOST_WAITING = 64
#: Seconds until accepting is tried again where there is no descriptor left.
_PAUSE_S = 0.05
_CONNECT_S = 20.0


@dataclass(frozen=True)
class Credentials:
    """What processes of one cluster know and others do not.

    Args:
        secret: what every connection begins with.
        server: how accepted connections are encrypted; None where they are not.
        client: how own connections are encrypted; None where they are not.
    """

    secret: bytes = field(repr=False)
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


class Listener:
    """Accepts connections that begin with the secret.

    Args:
        credentials: see `Credentials`.
        serve: called with each connection that said the secret, in a thread of its own.
        host: address to listen on.
        handshake_s: seconds that a connection has to say it.
    """

    def __init__(
        self,
        credentials: Credentials,
        serve: Callable[[socket.socket], None],
        host: str = "127.0.0.1",
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._credentials = credentials
        self._serve = serve
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}
        self._serving: set[socket.socket] = set()
        self._closed = False
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of connections that have not said the secret."""
        with self._lock:
            return len(self._waiting)

    def close(self) -> None:
        """Ends the listener and all its connections."""
        self._closed = True
        shut(self._socket)
        with self._lock:
            for connection in (*self._waiting, *self._serving):
                shut(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # No descriptor is left, or the peer is gone already: others may still come.
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                oldest = next(iter(self._waiting)) if len(self._waiting) >= MOST_WAITING else None
                if oldest is not None:
                    del self._waiting[oldest]
                    shut(oldest)
                self._waiting[connection] = None
            try:
                threading.Thread(target=self._run, args=(connection,), name="connection", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._drop(connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            served = self._checked(connection)
        except (OSError, EOFError, ValueError):
            served = None
        if served is None:
            self._drop(connection)
            return
        with self._lock:
            # One that gave way meanwhile is closed.
            known = self._waiting.pop(connection, "gone") is None and not self._closed
            if known:
                self._serving.add(served)
        if not known:
            shut(served)
            return
        try:
            self._serve(served)
        finally:
            with self._lock:
                self._serving.discard(served)
            shut(served)

    def _checked(self, connection: socket.socket) -> socket.socket | None:
        """The connection, encrypted where it is to be; None where it does not say the secret."""
        until = time.monotonic() + self._handshake_s
        connection.settimeout(self._handshake_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made: socket.socket = connection
        if self._credentials.server is not None:
            made = self._credentials.server.wrap_socket(connection, server_side=True)
        secret = self._credentials.secret
        said = bytearray()
        while len(said) < len(secret):
            made.settimeout(max(0.001, until - time.monotonic()))
            part = made.recv(len(secret) - len(said))
            if not part:
                return None
            said += part
        if not hmac.compare_digest(bytes(said), secret):
            return None
        made.settimeout(None)
        return made

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
        shut(connection)


def dial(address: tuple[str, int], credentials: Credentials) -> socket.socket:
    """A connection to a `Listener` that knows the same secret. OSError where there is none.

    Args:
        address: its host and port.
        credentials: see `Credentials`.
    """
    connection: socket.socket = socket.create_connection(address, timeout=_CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if credentials.client is not None:
            connection = credentials.client.wrap_socket(connection)
        connection.sendall(credentials.secret)
        connection.settimeout(None)
    except BaseException:
        shut(connection)
        raise
    return connection


def shut(connection: socket.socket) -> None:
    """Closes a socket that another thread may wait on, in the way that wakes it up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
