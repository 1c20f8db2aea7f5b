"""Connections of the driver to its workers, over which steps go in a fraction of the time of a call of Ray.

`serve_steps` is the worker's end, `StepLines` the driver's. Of each connection the driver's thread that calls is the
only one that reads or writes at its end, so that TLS needs no lock. A step with large arrays, and everything else, is
a call of Ray.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.runtime.ray.worker_group import Answer
from autopar.runtime.transport.channels import Credentials, Listener, dial, shut
from autopar.runtime.transport.frames import read_exactly
from autopar.runtime.transport.tiles import HostKeys

#: Number of the process, which a connection begins with.
NUMBER = struct.Struct("<i")
#: Length of what follows, and the number of the call.
HEAD = struct.Struct("<IQ")
#: Runs a step; see `WorkerHost.step`.
_StepFunction: TypeAlias = Callable[[bytes, Mapping[int, Any]], tuple[bytes, dict[int, Any]]]
#: Keys on the host, or an array.
_Host: TypeAlias = HostKeys | np.ndarray[Any, Any]
#: Bytes of arrays that a step may bring along; Ray has a store for larger ones.
MOST_BYTES = 1 << 20
#: Seconds that a process may take to take a message, or the rest of one to come.
_MESSAGE_S = 10.0


class HostArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in the form in which a connection carries it.

    Args:
        shape: shape of the array; of random keys the shape of their integers.
        dtype: name of the dtype, as "float32".
        data: the elements in C order.
        key: name of the generator ("threefry2x32") if the array holds random keys; else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    data: bytes
    key: str = ""


class StepCall(msgspec.Struct, frozen=True, array_like=True):
    """A step and its arrays, or its result and those; ``error`` where there is none."""

    message: bytes
    arrays: dict[int, HostArray]
    error: str = ""


CALLS = msgspec.msgpack.Decoder(StepCall)


def packed(array: _Host) -> HostArray:
    """An array as plain data."""
    data, key = (array.data, array.generator) if isinstance(array, HostKeys) else (array, "")
    return HostArray(tuple(data.shape), data.dtype.name, data.tobytes(), key)


def unpacked(array: HostArray) -> _Host:
    """The array of plain data; it is not to be written to."""
    data = np.frombuffer(array.data, jnp.dtype(array.dtype)).reshape(array.shape)
    return HostKeys(array.key, data) if array.key else data


def encoded(message: bytes, arrays: Mapping[int, _Host], error: str = "") -> bytes:
    """A step and its arrays as bytes, or its result and those.

    Args:
        message: a `Step` or a `StepResult`, as bytes.
        arrays: by number.
        error: in place of a result.
    """
    return msgspec.msgpack.encode(StepCall(message, {id: packed(a) for id, a in arrays.items()}, error))


def serve_steps(
    address: tuple[str, int],
    credentials: Credentials,
    process: int,
    step: _StepFunction,
) -> None:
    """The worker's end: connects, and runs steps that come in a thread of its own until the connection ends.

    Args:
        address: of the driver's `StepLines`.
        credentials: what the connection begins with.
        process: number of this process.
        step: runs one, from its message and arrays to its result and small arrays.
    """
    connection = dial(address, credentials)
    connection.sendall(NUMBER.pack(process))
    threading.Thread(target=_serve, args=(connection, step), name="steps", daemon=True).start()


def _serve(connection: socket.socket, step: _StepFunction) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            length, number = HEAD.unpack(read_exactly(connection, HEAD.size))
            call = CALLS.decode(read_exactly(connection, length))
            try:
                answer = encoded(*step(call.message, {id: unpacked(a) for id, a in call.arrays.items()}))
            except Exception as error:
                answer = encoded(b"", {}, f"{type(error).__name__}: {error}")
            connection.sendall(HEAD.pack(len(answer), number) + answer)
    shut(connection)


class StepLines:
    """The driver's connections to worker processes, over which steps and their small arrays go without Ray.

    Args:
        credentials: what connections begin with.
        host: address to listen on.
    """

    def __init__(self, credentials: Credentials, host: str) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._lines: dict[int, _ProcessLine] = {}
        self._number = 0
        self._listener = Listener(credentials, self._keep, host)
        self.address = self._listener.address

    @property
    def is_closed(self) -> bool:
        """Whether the connections ended: by `close`, or since somebody was interrupted in the middle of a message."""
        return self._over.is_set()

    def takes(self, arguments: Sequence[tuple[Any, ...]]) -> bool:
        """Whether steps go this way: all processes are connected, and their arrays are small.

        Args:
            arguments: of `WorkerHost.step` of each process.
        """
        with self._lock:
            whole = len(self._lines) >= len(arguments) and not self.is_closed
        return whole and all(_bytes(given) <= MOST_BYTES for _, given in arguments)

    def call(self, process: int, method: str, *args: Any) -> tuple[int, int]:
        """Begins a step of a process; returns a ticket for `wait`."""
        self._number += 1
        message, given = args
        with self._intact():
            self._lines[process].send(self._number, encoded(message, given))
        return process, self._number

    def wait(self, tickets: Sequence[tuple[int, int]], timeout_s: float) -> dict[int, Answer]:
        """Answers that have arrived, by position in ``tickets``; waits until all have, or ``timeout_s`` is over."""
        until = time.monotonic() + timeout_s
        answers: dict[int, Answer] = {}
        with self._intact():
            while True:
                for position, (process, number) in enumerate(tickets):
                    if position not in answers and (answer := self._lines[process].answer(number)) is not None:
                        answers[position] = answer
                left = until - time.monotonic()
                if len(answers) == len(tickets) or left <= 0:
                    return answers
                asked = [self._lines[p] for n, (p, _) in enumerate(tickets) if n not in answers]
                _receive(asked, left)

    def close(self) -> None:
        """Ends all connections."""
        self._over.set()
        self._listener.close()

    @contextlib.contextmanager
    def _intact(self) -> Iterator[None]:
        """Whoever is interrupted in the middle of a message (Ctrl-C) leaves no connection that could be used."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _keep(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            connection.settimeout(_MESSAGE_S)
            (process,) = NUMBER.unpack(read_exactly(connection, NUMBER.size))
            with self._lock:
                self._lines[process] = _ProcessLine(connection)
            self._over.wait()


class _ProcessLine:
    """The connection to one process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._came = bytearray()
        self._is_lost = False

    def fileno(self) -> int:
        """Descriptor for `select`."""
        return self._connection.fileno()

    def send(self, number: int, body: bytes) -> None:
        """Sends a message; one that does not arrive shows when the answer is read."""
        try:
            self._connection.sendall(HEAD.pack(len(body), number) + body)
        except OSError:
            self._is_lost = True

    def receive(self) -> None:
        """Reads what is there."""
        try:
            data = self._connection.recv(1 << 16)
            while isinstance(self._connection, ssl.SSLSocket) and (left := self._connection.pending()):
                data += self._connection.recv(left)
        except OSError:
            data = b""
        self._came += data
        self._is_lost = self._is_lost or not data

    def answer(self, number: int) -> Answer | None:
        """The answer to a call; None where it has not come. Answers to earlier calls are dropped."""
        while len(self._came) >= HEAD.size:
            length, came = HEAD.unpack_from(self._came)
            end = HEAD.size + length
            if len(self._came) < end:
                break
            body = bytes(self._came[HEAD.size : end])
            del self._came[:end]
            if came == number:
                call = CALLS.decode(body)
                if call.error:
                    return Answer(error=call.error)
                return Answer((call.message, {id: unpacked(a) for id, a in call.arrays.items()}))
        return Answer(error="its process ended", lost=True) if self._is_lost else None


def _receive(lines: Sequence[_ProcessLine], timeout_s: float) -> None:
    """Reads what comes on connections, after waiting until something does."""
    watched = select.poll()
    by_handle = {}
    for line in lines:
        if (handle := line.fileno()) >= 0:
            by_handle[handle] = line
            watched.register(handle, select.POLLIN)
        else:
            line.receive()
    for handle, _ in watched.poll(1000 * timeout_s) if by_handle else ():
        by_handle[handle].receive()


def _bytes(given: Mapping[int, Any]) -> int:
    return sum(a.data.nbytes if isinstance(a, HostKeys) else a.nbytes for a in given.values())
