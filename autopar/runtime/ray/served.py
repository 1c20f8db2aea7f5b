"""The worker's end of the connections that steps come over, and what is said on them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.runtime.transport.channels import Credentials, dial, shut
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
        step: runs one; see `WorkerHost.step`.
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
