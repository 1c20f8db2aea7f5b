"""Workers in processes of their own: one TCP connection for each direction between two of them.

`SocketLink` has a worker's connections. Sending is done by a thread for each receiver, which also waits for the array
to be computed, so that the worker goes on with its list. A thread for each sender reads ahead by a few arrays, into an
`Inbox`. What belongs to a step carries its number, so that nothing that is left of a step that failed is taken for
another one's.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding

from autopar.errors import ScheduleError
from autopar.runtime.transport.base import POLL_S, ArrivalLink, PeerLostError, SilentPeerError, StepAbortedError
from autopar.runtime.transport.channels import Credentials, Listener, dial, shut
from autopar.runtime.transport.direct import Offered, Received, Transfers, merged
from autopar.runtime.transport.frames import Frame, read_exactly, read_frame, write_frame, write_offer
from autopar.runtime.transport.queues import check_tag
from autopar.runtime.transport.tiles import Box, cut, is_key, list_shards, placed, tiles_of

#: Arrays that are read ahead from a sender before it has to wait.
_AHEAD = 8
_NUMBER = struct.Struct("<i")
#: Seconds between two looks at whether what was pulled is there.
_POLL_S = 0.0002
#: Shape of an array -> parts of it.
Boxes: TypeAlias = Callable[[Sequence[int]], Sequence[Box]]


class Inbox:
    """Arrays of one sender.

    Args:
        source: number of the sender.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._aborted = -1

    def would_block(self, step: int) -> bool:
        """Whether `take` of a step would wait: nothing came for it, and nothing failed; older frames are dropped."""
        with self._changed:
            self._drop_older(step)
            return not self._frames and self._error is None and self._aborted < step

    def put(self, frame: Frame) -> None:
        """Adds a frame; waits while there are too many. EOFError where the inbox was closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) < _AHEAD or self._closed)
            if self._closed:
                raise EOFError("the receiver was closed")
            self._frames.append(frame)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def abort(self, step: int) -> None:
        """Ends all waiting for frames of a step and those before it."""
        with self._changed:
            self._aborted = max(self._aborted, step)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._closed = True
            self._error = self._error or EOFError("the connection was closed")
            self._changed.notify_all()

    def next_tag(self, step: int, from_s: float, until_s: float) -> int:
        """The tag of the frame that `take` would return; arguments and errors are its own."""
        with self._changed:
            return self._next(step, from_s, until_s).tag

    def take(self, step: int, from_s: float, until_s: float) -> Frame:
        """The next frame of a step; older ones are dropped.

        Args:
            step: number of the step.
            from_s: when waiting began, by the monotonic clock.
            until_s: when it ends.

        Raises:
            PeerLostError: the connection broke.
            SilentPeerError: nothing came in time.
            StepAbortedError: the step was given up.
            ScheduleError: a frame of a later step came.
        """
        with self._changed:
            self._next(step, from_s, until_s)
            self._changed.notify_all()
            return self._frames.popleft()

    def _next(self, step: int, from_s: float, until_s: float) -> Frame:
        while True:
            self._drop_older(step)
            if self._frames:
                if self._frames[0].step > step:
                    raise ScheduleError(f"worker {self._source} sent step {self._frames[0].step} in step {step}")
                return self._frames[0]
            if self._error is not None:
                raise PeerLostError(self._source, str(self._error)) from self._error
            if self._aborted >= step:
                raise StepAbortedError(step)
            left = until_s - time.monotonic()
            if left <= 0:
                raise SilentPeerError(self._source, time.monotonic() - from_s)
            self._changed.wait(left)

    def _drop_older(self, step: int) -> None:
        while self._frames and self._frames[0].step < step:
            self._frames.popleft()
            self._changed.notify_all()


class SocketLink(ArrivalLink):
    """A worker's connections over TCP.

    Args:
        worker: its number.
        credentials: what connections begin with; bytes are a secret without encryption.
        host: address to listen on.

    With ``transfers``, to be set before the first array is sent, receivers pull arrays, of which they are told here.
    """

    def __init__(self, worker: int, credentials: Credentials | bytes, host: str = "127.0.0.1") -> None:
        self.transfers: Transfers | None = None
        self._worker = worker
        self._credentials = credentials if isinstance(credentials, Credentials) else Credentials(credentials)
        self._step = 0
        self._waited_from = time.monotonic()
        self._deadline = self._waited_from + 60
        self._addresses: dict[int, tuple[str, int]] = {}
        self._outgoing: dict[int, _Sender] = {}
        self._incoming: dict[int, Inbox] = {}
        self._servers: dict[str, int] = {}
        self._aborted = -1
        self._lock = threading.Lock()
        self._listener = Listener(self._credentials, self._read, host)
        self.address = self._listener.address

    def connect(self, addresses: Mapping[int, tuple[str, int]], targets: tuple[int, ...]) -> None:
        """Makes the connections to ``targets``; others are made when something is first sent."""
        self._addresses = dict(addresses)
        for worker in targets:
            self._sender(worker)

    def begin(self, deadline_s: float, step: int = 0) -> None:
        """Makes `receive` take the values of a step, with a deadline of ``deadline_s`` seconds."""
        self._step = step
        self._waited_from = time.monotonic()
        self._deadline = self._waited_from + deadline_s
        if self.transfers is not None:
            self.transfers.next_step()

    def abort(self, step: int) -> None:
        """Ends all waiting for arrays of a step."""
        with self._lock:
            self._aborted = max(self._aborted, step)
            inboxes = list(self._incoming.values())
        for inbox in inboxes:
            inbox.abort(step)

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        """Sends a copy of an array; returns before it arrived, and keeps the array alive as long as it must."""
        self.send_shards(to, tag, array)

    def send_shards(self, to: int, tag: int, array: Any, boxes: Boxes | None = None) -> None:
        """Sends parts of an array that this process holds.

        Args:
            to: who gets them.
            tag: what the receiver must ask for.
            array: the array.
            boxes: shape of the array (of the data of keys) -> parts of it that are wanted; None wants all.
        """
        list_shards(array)  # the thread that sends it reads them, and so may that of another receiver
        self._sender(to).lines.put((self._step, tag, array, boxes))

    def has_room(self, to: int) -> bool:
        """Whether another array may be sent before ``to`` took the last one: always, for a thread holds it."""
        return True

    def ready(self, source: int) -> bool:
        """Whether `receive` would return, or fail, at once."""
        return not self._inbox(source).would_block(self._step)

    def wait_any(self, sources: Sequence[int]) -> int:
        """The source of which `receive` would return, or fail; waits for one. At the deadline the first source."""
        while time.monotonic() < self._deadline:
            for source in sources:
                if self.ready(source):
                    return source
            time.sleep(POLL_S)
        return sources[0]

    def next_tag(self, source: int) -> int:
        """The tag of the next array that ``source`` sent; waits, and fails, as `receive` does."""
        return self._inbox(source).next_tag(self._step, self._waited_from, self._deadline)

    @property
    def queued(self) -> int:
        """Arrays that wait to be sent."""
        return sum(sender.lines.qsize() for sender in list(self._outgoing.values()))

    @property
    def sent_bytes(self) -> int:
        """Bytes of arrays that were sent, or pulled from here, so far."""
        return sum(sender.bytes for sender in list(self._outgoing.values()))

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        """The next array that ``source`` sent. Without a sharding it stays on the host until somebody needs it."""
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
        """The next shards from ``source``; see `WorkerLink.receive`."""
        frame = self._inbox(source).take(self._step, self._waited_from, self._deadline)
        check_tag(source, tag, frame.tag)
        if isinstance(frame.array, Offered):
            self._servers.update(dict.fromkeys((piece.server for piece in frame.array.shards), source))
        return frame.array

    def finish(self, arrays: Sequence[Any]) -> None:
        """Returns when arrays are computed that may wait for pieces that are pulled, which nothing else limits.

        Raises:
            SilentPeerError: a piece did not come until the deadline.
        """
        # jax does not say of typed keys whether they are computed, but of their data.
        data: list[Any] = []
        if self.transfers is not None:
            data = [jax.random.key_data(a) if is_key(a) else a for a in arrays]
        while self.transfers is not None and not all(a.is_ready() for a in data):
            if time.monotonic() > self._deadline:
                server = self.transfers.late()
                if server is None:  # what computes is slow
                    break
                raise SilentPeerError(self._servers.get(server, -1), time.monotonic() - self._waited_from)
            time.sleep(_POLL_S)
        jax.block_until_ready(arrays)

    def close(self) -> None:
        """Ends all connections."""
        self._listener.close()
        for sender in list(self._outgoing.values()):
            sender.lines.put(None)
            shut(sender.connection)
        with self._lock:
            inboxes = list(self._incoming.values())
        for inbox in inboxes:
            inbox.close()

    def _sender(self, to: int) -> _Sender:
        if to not in self._outgoing:
            try:
                connection = dial(self._addresses[to], self._credentials)
                connection.sendall(_NUMBER.pack(self._worker))
            except OSError as error:
                raise PeerLostError(to, str(error)) from error
            self._outgoing[to] = _Sender(connection, self.transfers)
        return self._outgoing[to]

    def _inbox(self, source: int) -> Inbox:
        with self._lock:
            if source not in self._incoming:
                self._incoming[source] = Inbox(source)
                self._incoming[source].abort(self._aborted)
            return self._incoming[source]

    def _read(self, connection: socket.socket) -> None:
        try:
            (source,) = _NUMBER.unpack(read_exactly(connection, _NUMBER.size))
        except (OSError, EOFError):
            return
        inbox = self._inbox(source)
        try:
            while True:
                inbox.put(read_frame(connection))
        except (OSError, EOFError) as error:
            inbox.fail(error)


class _Sender:
    """A connection to one worker, and the thread that writes to it; see `SocketLink` for ``transfers``."""

    def __init__(self, connection: socket.socket, transfers: Transfers | None) -> None:
        self.connection = connection
        self.bytes = 0
        self._transfers = transfers
        self.lines: queue.SimpleQueue[tuple[int, int, Any, Boxes | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="send", daemon=True).start()

    def _write(self) -> None:
        # A failure shows at the receiver, whose end of the connection is closed then.
        while (item := self.lines.get()) is not None:
            step, tag, array, boxes = item
            try:
                offered = None if self._transfers is None else self._transfers.offer(array, boxes)
                if offered is not None:
                    write_offer(self.connection, tag, offered, step)
                    self.bytes += offered.bytes
                    continue
                tiled = tiles_of(array)
                part = tiled if boxes is None else cut(tiled, boxes(tiled.shape))
                write_frame(self.connection, tag, part, step)
                self.bytes += sum(tile.data.nbytes for tile in part.tiles)
            except Exception:
                shut(self.connection)
                return
