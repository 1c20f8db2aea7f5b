"""Connections between processes of one cluster: who may connect, and what those cost who may not.

A connection begins with a secret, inside of TLS where the credentials have a certificate. Until the secret was read it
has a deadline, and there are a bounded number of such connections, of which the oldest gives way.
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
from typing import Any

#: Seconds that a connection has to say the secret.
HANDSHAKE_S = 10.0
#: Connections that have not said it yet.
MOST_UNAUTHENTICATED = 64
#: Seconds until accepting is tried again where there is no descriptor left.
_PAUSE_S = 0.05
_CONNECT_S = 20.0


@dataclass(frozen=True)
class Credentials:
    """Secrets of the processes of one cluster.

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
        credentials: secret, and certificate if there is one, that the processes of a cluster share.
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
        self._unauthenticated: dict[int, socket.socket] = {}
        self._serving: set[socket.socket] = set()
        self._closed = False
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Ends the listener and all its connections."""
        self._closed = True
        shut(self._socket)
        with self._lock:
            for connection in (*self._unauthenticated.values(), *self._serving):
                shut(connection)

    def _accept(self) -> None:
        number = 0
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # No descriptor is left, or the peer is gone already: others may still come.
                time.sleep(_PAUSE_S)
                continue
            number += 1
            with self._lock:
                if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
                    shut(self._unauthenticated.pop(next(iter(self._unauthenticated))))
                self._unauthenticated[number] = connection
            try:
                threading.Thread(target=self._run, args=(number, connection), name="connection", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._drop(number, connection)

    def _run(self, number: int, connection: socket.socket) -> None:
        opened = connection
        try:
            opened = self._encrypted(number, connection)
            is_friend = self._says_secret(opened)
        except (OSError, EOFError, ValueError):
            is_friend = False
        with self._lock:
            # One that gave way meanwhile is closed.
            served = is_friend and number in self._unauthenticated and not self._closed
            if served:
                del self._unauthenticated[number]
                self._serving.add(opened)
        if not served:
            self._drop(number, opened)
            return
        try:
            self._serve(opened)
        finally:
            with self._lock:
                self._serving.discard(opened)
            shut(opened)

    def _encrypted(self, number: int, connection: socket.socket) -> socket.socket:
        """The connection, encrypted where it is to be."""
        connection.settimeout(self._handshake_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._credentials.server is None:
            return connection
        # The connection becomes another object before the first byte is read, so that it can be closed meanwhile.
        encrypted = self._credentials.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            if number in self._unauthenticated:
                self._unauthenticated[number] = encrypted
        try:
            encrypted.do_handshake()
        except BaseException:
            shut(encrypted)
            raise
        return encrypted

    def _says_secret(self, connection: socket.socket) -> bool:
        until = time.monotonic() + self._handshake_s
        secret = self._credentials.secret
        said = bytearray()
        while len(said) < len(secret):
            connection.settimeout(max(0.001, until - time.monotonic()))
            part = connection.recv(len(secret) - len(said))
            if not part:
                return False
            said += part
        connection.settimeout(None)
        return hmac.compare_digest(bytes(said), secret)

    def _drop(self, number: int, connection: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(number, None)
        shut(connection)


def dial(address: tuple[str, int], credentials: Credentials) -> socket.socket:
    """A connection to a `Listener` that knows the same secret. OSError where there is none.

    Args:
        address: its host and port.
        credentials: secret, and certificate if there is one, that the processes of a cluster share.
    """
    connection: Any = socket.create_connection(address, timeout=_CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if credentials.client is not None:
            connection = credentials.client.wrap_socket(connection, do_handshake_on_connect=False)
            connection.do_handshake()  # after this object is known, so that it is closed where that fails
        connection.sendall(credentials.secret)
        connection.settimeout(None)
    except BaseException:
        shut(connection)
        raise
    opened: socket.socket = connection
    return opened


def shut(connection: socket.socket) -> None:
    """Closes a socket that another thread may wait on, in the way that wakes it up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
