"""Workers in processes of their own: one TCP connection for each direction between two of them.

Sending is done by a thread for each receiver, which also waits for the array to be computed, so that the worker goes on
with its list. A thread for each sender reads ahead by a few arrays. A connection begins with a secret that the driver
made, so that nobody else can send.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding

from autopar.runtime.transport.base import Link, PeerLostError, SilentPeerError
from autopar.runtime.transport.direct import Offered, Received, Transfers, merged
from autopar.runtime.transport.frames import read_exactly, read_frame, write_frame, write_offer
from autopar.runtime.transport.queues import check_tag
from autopar.runtime.transport.shards import cut
from autopar.runtime.transport.tiles import Box, placed, tiles_of

_NUMBER = struct.Struct("<i")
#: Shape of an array -> parts of it.
Boxes: TypeAlias = Callable[[Sequence[int]], Sequence[Box]]
#: Arrays that are read ahead from a sender before it has to wait.
_AHEAD = 8


class SocketLink(Link):
    """A worker's connections over TCP.

    Args:
        worker: its number.
        secret: what every connection begins with.
        host: address to listen on.

    With ``transfers``, to be set before the first array is sent, receivers pull arrays, of which they are told here.
    """

    def __init__(self, worker: int, secret: bytes, host: str = "127.0.0.1") -> None:
        self.transfers: Transfers | None = None
        self._worker = worker
        self._secret = secret
        self._deadline = time.monotonic() + 60
        self._waited_from = time.monotonic()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._outgoing: dict[int, _Sender] = {}
        self._incoming: dict[int, queue.Queue[tuple[int, Received] | Exception]] = {}
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def connect(self, addresses: Mapping[int, tuple[str, int]], targets: tuple[int, ...]) -> None:
        """Makes the connections to ``targets``; others are made when something is first sent."""
        self._addresses = dict(addresses)
        for worker in targets:
            self._sender(worker)

    def until(self, deadline_s: float) -> None:
        """From now on `receive` waits for ``deadline_s`` seconds at most, counted from this call."""
        self._waited_from = time.monotonic()
        self._deadline = self._waited_from + deadline_s
        if self.transfers is not None:
            self.transfers.next_step()

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        """See `Link.send`."""
        self.send_shards(to, tag, array)

    def send_shards(self, to: int, tag: int, array: Any, boxes: Boxes | None = None) -> None:
        """Sends pieces of an array that this process holds.

        Args:
            to: who gets them.
            tag: what the receiver must ask for.
            array: the array.
            boxes: shape of the array (of the data of keys) -> parts of it that are wanted; None wants all.
        """
        self._sender(to).lines.put((tag, array, boxes))

    def has_room(self, to: int) -> bool:
        """See `Link.has_room`: what is sent waits in a thread of its own."""
        return True

    def ready(self, source: int) -> bool:
        """See `Link.ready`."""
        return not self._line(source).empty()

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        """See `Link.receive`; without a sharding the array stays on the host until somebody needs it."""
        return self.laid([self.receive_shards(source, tag)], sharding)

    def laid(self, parts: Sequence[Received], sharding: NamedSharding | None) -> Any:
        """An array of which these parts came.

        Args:
            parts: what each process sent of it.
            sharding: how it is to lie; without one it stays on the host.
        """
        came = merged(parts, self.transfers)
        if isinstance(came, Offered):
            if self.transfers is None:
                raise PeerLostError(-1, "arrays were offered to a process that cannot pull them")
            if sharding is not None:
                return self.transfers.laid(came, sharding)
            came = self.transfers.on_host(came)
        return came.array() if sharding is None else placed(came, sharding)

    def receive_shards(self, source: int, tag: int) -> Received:
        """The pieces that ``source`` sent next; see `Link.receive`."""
        try:
            came = self._line(source).get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise SilentPeerError(source, time.monotonic() - self._waited_from) from None
        if isinstance(came, Exception):
            raise PeerLostError(source, str(came)) from came
        found, pieces = came
        check_tag(source, tag, found)
        return pieces

    def close(self) -> None:
        """Ends all connections."""
        shut(self._listener)
        for sender in self._outgoing.values():
            sender.lines.put(None)
            shut(sender.connection)
        with self._lock:
            for connection in self._accepted:
                shut(connection)

    def _sender(self, to: int) -> _Sender:
        if to not in self._outgoing:
            try:
                connection = socket.create_connection(self._addresses[to], timeout=20)
            except OSError as error:
                raise PeerLostError(to, str(error)) from error
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._secret + _NUMBER.pack(self._worker))
            self._outgoing[to] = _Sender(connection, self.transfers)
        return self._outgoing[to]

    def _line(self, source: int) -> queue.Queue[tuple[int, Received] | Exception]:
        with self._lock:
            return self._incoming.setdefault(source, queue.Queue(_AHEAD))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._accepted.append(connection)
            threading.Thread(target=self._read, args=(connection,), name="receive", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            greeting = bytes(read_exactly(connection, len(self._secret)))
            if not hmac.compare_digest(greeting, self._secret):
                shut(connection)
                return
            (source,) = _NUMBER.unpack(read_exactly(connection, _NUMBER.size))
        except (OSError, EOFError):
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = self._line(source)
        try:
            while True:
                line.put(read_frame(connection))
        except (OSError, EOFError) as error:
            line.put(error)


class _Sender:
    """A connection to one worker, and the thread that writes to it; see `SocketLink` for ``transfers``."""

    def __init__(self, connection: socket.socket, transfers: Transfers | None) -> None:
        self.connection = connection
        self._transfers = transfers
        self.lines: queue.SimpleQueue[tuple[int, Any, Boxes | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="send", daemon=True).start()

    def _write(self) -> None:
        # A failure shows at the receiver, whose end of the connection is closed then.
        while (item := self.lines.get()) is not None:
            tag, array, boxes = item
            try:
                offered = None if self._transfers is None else self._transfers.offer(array, boxes)
                if offered is not None:
                    write_offer(self.connection, tag, offered)
                    continue
                tiled = tiles_of(array)
                write_frame(self.connection, tag, tiled if boxes is None else cut(tiled, boxes(tiled.shape)))
            except Exception:
                shut(self.connection)
                return


def shut(connection: socket.socket) -> None:
    """Closes a socket that another thread may wait on, in the way that wakes it up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
