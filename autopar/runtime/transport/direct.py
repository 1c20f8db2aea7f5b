"""Arrays that another process pulls straight from this one's devices, by `jax.experimental.transfer`.

The sender offers each piece under a number of its own, and tells the receiver the numbers over their connection. The
receiver pulls each piece once, onto the first of its devices that has a part of it; the others take their parts from
there (the local all-gather of Zhuang et al., MLSys'23). Nothing passes through the memory of a host that has devices
with memory of their own, and neither side waits.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import transfer
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.runtime.transport.tiles import Box, Tile, Tiled, device_boxes, is_key

_NUMBER_BITS = 62
_ATTEMPTS = 5


@dataclass(frozen=True)
class OfferedShard:
    """A rectangular part of an array that its process offers, for a receiver's device to pull.

    Args:
        start: index of its first element.
        shape: its shape.
        server: address of the process that has it.
        number: number under which it can be pulled, once.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    server: str
    number: int

    @property
    def box(self) -> Box:
        """First index and index after the last of each dim."""
        return tuple((a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Offered:
    """An array as pieces to be pulled; see `Tiled`, which has them at hand."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[OfferedShard, ...]
    key: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all pieces together."""
        return sum(math.prod(p.shape) for p in self.shards) * jnp.dtype(self.dtype).itemsize


#: An array as it came: its elements, or where they can be pulled.
Received: TypeAlias = Tiled | Offered


class Transfers:
    """Offers and pulls of this process.

    Args:
        host: address to listen on.
    """

    def __init__(self, host: str) -> None:
        self._server = _server(host)
        self._connections: dict[str, Any] = {}
        self._lock = threading.Lock()
        # An array has to be kept until it was pulled: those of this step, and of the one before.
        self._kept: list[list[Any]] = [[], []]
        # What is pulled in this step, with the server that has it.
        self._pulls: list[tuple[str, Any]] = []

    def next_step(self) -> None:
        """All that was offered before the step that now ends was pulled."""
        with self._lock:
            self._kept = [[], self._kept[0]]
            self._pulls = []

    def late(self) -> str | None:
        """The server of the first piece of this step that was pulled and is not there; None where all are."""
        with self._lock:
            pulls = list(self._pulls)
        return next((server for server, array in pulls if not array.is_deleted() and not array.is_ready()), None)

    def offer(self, array: Any, boxes: Callable[[Sequence[int]], Sequence[Box]] | None = None) -> Offered | None:
        """Offers the distinct pieces of an array that this process holds; None where there is nothing to pull.

        Args:
            array: a `jax.Array`, computed or not; others are not offered.
            boxes: shape of the array (of the data of keys) -> parts of it that are wanted; None wants all.
        """
        if not isinstance(array, jax.Array) or array.size == 0:
            return None
        key = str(jax.random.key_impl(array)) if is_key(array) else ""
        data = jax.random.key_data(array) if key else array
        wanted = None if boxes is None else boxes(data.shape)
        shards: list[OfferedShard] = []
        for shard in data.addressable_shards:
            if shard.replica_id != 0:
                continue
            whole = tuple(s.indices(n)[:2] for s, n in zip(shard.index, data.shape, strict=True))
            for box in (whole,) if wanted is None else wanted:
                part = common(whole, box)
                if part is not None:
                    shards.append(self._offered(part, _cut(shard.data, whole, part)))
        return Offered(tuple(data.shape), data.dtype.name, tuple(shards), key)

    def _offered(self, box: Box, data: Any) -> OfferedShard:
        number = secrets.randbits(_NUMBER_BITS)
        with self._lock:
            self._kept[0].append(data)
        self._server.await_pull(number, [data])
        return OfferedShard(tuple(a for a, _ in box), tuple(data.shape), self._server.address(), number)

    def pulled(self, piece: OfferedShard, dtype: str, device: jax.Device) -> Any:
        """A piece on a device; it need not be there yet."""
        if piece.server not in self._connections:
            self._connections[piece.server] = self._server.connect(piece.server)
        wanted = jax.ShapeDtypeStruct(piece.shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))
        array = self._connections[piece.server].pull(piece.number, [wanted])[0]
        with self._lock:
            self._pulls.append((piece.server, array))
        return array

    def on_host(self, offered: Offered) -> Tiled:
        """The pieces on the host."""
        device = jax.local_devices()[0]
        tiles = [Tile(p.start, np.asarray(self.pulled(p, offered.dtype, device))) for p in offered.shards]
        return Tiled(offered.shape, offered.dtype, tuple(tiles), offered.key)

    def laid(self, offered: Offered, sharding: NamedSharding) -> Any:
        """The array on devices of this process.

        Args:
            offered: pieces that cover all parts of devices of this process.
            sharding: of the array as its users see it; typed keys have no dim for their data.
        """
        if offered.key:
            data = self.laid(Offered(offered.shape, offered.dtype, offered.shards), sharding)
            return jax.random.wrap_key_data(data, impl=offered.key)
        parts = device_boxes(sharding, offered.shape)
        buffers: dict[jax.Device, Any] = {}
        for piece in offered.shards:
            takers = {d: part for d, box in parts.items() if (part := common(box, piece.box)) is not None}
            if not takers:
                continue
            pulled = self.pulled(piece, offered.dtype, next(iter(takers)))
            for device, part in takers.items():
                shard = jax.device_put(_cut(pulled, piece.box, part), device)
                if part == parts[device]:
                    buffers[device] = shard
                    continue
                if device not in buffers:
                    sizes = tuple(b - a for a, b in parts[device])
                    buffers[device] = jnp.zeros(sizes, jnp.dtype(offered.dtype), device=device)
                at = [a - first for (a, _), (first, _) in zip(part, parts[device], strict=True)]
                buffers[device] = lax.dynamic_update_slice(buffers[device], shard, at)
        arrays = [buffers[d] for d in parts]
        return jax.make_array_from_single_device_arrays(offered.shape, sharding, arrays, dtype=jnp.dtype(offered.dtype))


def merged(parts: Sequence[Received], transfers: Transfers | None) -> Received:
    """One array from what several processes sent of it: offered where all of it is."""
    offered = [p for p in parts if isinstance(p, Offered)]
    tiled = [p for p in parts if isinstance(p, Tiled)]
    if offered and not any(p.tiles for p in tiled):
        first = offered[0]
        return Offered(first.shape, first.dtype, tuple(piece for p in offered for piece in p.shards), first.key)
    if transfers is not None:
        tiled += [transfers.on_host(p) for p in offered]
    return Tiled(tiled[0].shape, tiled[0].dtype, tuple(t for p in tiled for t in p.tiles), tiled[0].key)


def common(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None where it is empty."""
    both = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return both if all(low < high for low, high in both) else None


def _cut(data: Any, of: Box, part: Box) -> Any:
    """The elements ``part`` of an array whose own are ``of``, on its device."""
    if of == part:
        return data
    starts = [low - first for (low, _), (first, _) in zip(part, of, strict=True)]
    return lax.dynamic_slice(data, starts, [high - low for low, high in part])


def _server(host: str) -> Any:
    """A server on a free port, which has to be named: with port 0 it would hang."""
    client = jax.local_devices()[0].client
    for attempt in range(_ATTEMPTS):
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        try:
            return transfer.start_transfer_server(client, f"{host}:{port}", [f"{host}:0"])
        except Exception:  # somebody else took the port meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")
