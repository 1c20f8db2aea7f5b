"""Tiled arrays as bytes: a length, a MessagePack header, then the tiles one after another. Nothing is pickled."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.runtime.transport.direct import Offered, OfferedShard, Received
from autopar.runtime.transport.tiles import Tile, Tiled

_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 24


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The part of a frame before its tiles.

    Args:
        tag: of the transfer.
        shape: shape of the whole array.
        dtype: name of its dtype.
        key: random number generator of keys, or empty.
        starts: first index of each tile.
        sizes: shape of each tile.
        server: where the tiles can be pulled; empty where they follow.
        numbers: as what.
        step: number of the step that it belongs to.
    """

    tag: int
    shape: tuple[int, ...]
    dtype: str
    key: str
    starts: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    server: str = ""
    numbers: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True)
class Frame:
    """A message received over a connection.

    Args:
        step: number of the step that it belongs to.
        tag: of the transfer.
        array: its elements, or where they can be pulled.
    """

    step: int
    tag: int
    array: Received


def write_frame(connection: socket.socket, tag: int, tiled: Tiled, step: int = 0) -> None:
    """Sends an array; OSError where the connection breaks."""
    header = msgspec.msgpack.encode(
        Header(
            tag,
            tiled.shape,
            tiled.dtype,
            tiled.key,
            tuple(t.start for t in tiled.tiles),
            tuple(t.data.shape for t in tiled.tiles),
            step=step,
        )
    )
    small = [_LENGTH.pack(len(header)), header]
    if tiled.bytes < 1 << 15:
        connection.sendall(b"".join([*small, *(t.data.tobytes() for t in tiled.tiles)]))
        return
    connection.sendall(b"".join(small))
    for tile in tiled.tiles:
        connection.sendall(_view(tile.data))


def write_offer(connection: socket.socket, tag: int, offered: Offered, step: int = 0) -> None:
    """Sends where an array can be pulled; OSError where the connection breaks."""
    shards = offered.shards
    header = msgspec.msgpack.encode(
        Header(
            tag,
            offered.shape,
            offered.dtype,
            offered.key,
            tuple(p.start for p in shards),
            tuple(p.shape for p in shards),
            next((p.server for p in shards), ""),
            tuple(p.number for p in shards),
            step,
        )
    )
    connection.sendall(_LENGTH.pack(len(header)) + header)


def read_frame(connection: socket.socket) -> Frame:
    """The next array that was sent; EOFError at the end, OSError where the connection breaks."""
    (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if length > _LONGEST_HEADER:
        raise EOFError(f"a header of {length} bytes")
    header = msgspec.msgpack.decode(read_exactly(connection, length), type=Header)
    if header.server:
        buffers = zip(header.starts, header.sizes, header.numbers, strict=True)
        shards = tuple(OfferedShard(start, size, header.server, number) for start, size, number in buffers)
        return Frame(header.step, header.tag, Offered(header.shape, header.dtype, shards, header.key))
    tiles = []
    for start, size in zip(header.starts, header.sizes, strict=True):
        data: np.ndarray[Any, Any] = np.empty(size, jnp.dtype(header.dtype))
        _read_into(connection, _view(data))
        tiles.append(Tile(start, data))
    return Frame(header.step, header.tag, Tiled(header.shape, header.dtype, tuple(tiles), header.key))


def read_exactly(connection: socket.socket, count: int) -> bytearray:
    """``count`` bytes; EOFError where the connection ends before."""
    data = bytearray(count)
    _read_into(connection, memoryview(data))
    return data


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the connection was closed")
        view = view[count:]


def _view(data: np.ndarray[Any, Any]) -> memoryview:
    # As bytes: the buffer protocol knows no bfloat16.
    return data.reshape(-1).view(np.uint8).data
