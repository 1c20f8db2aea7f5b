"""Arrays as host tiles: each distinct piece of a sharded array once, and arrays put together from such pieces.

Devices that hold copies of a piece send it once. The receiver puts every device's own part together from what came.
`tiles_of` makes tiles, `placed` makes an array of them. `ShardLayout` says which parts the processes of a worker hold,
computed without devices, so that a sender knows them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

#: An array on the host of up to this size goes to devices with the call of the program that reads it.
SMALL_BYTES = 1 << 16
#: A rectangular part of an array: (first index, index after the last) of each dim.
Box: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HostKeys:
    """Typed keys of a random number generator on the host.

    Args:
        generator: its name.
        data: what the keys are made of.
    """

    generator: str
    data: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tile:
    """A rectangular piece of an array.

    Args:
        start: index of its first element.
        data: its elements, contiguous.
    """

    start: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tiled:
    """An array as tiles.

    Args:
        shape: shape of the whole.
        dtype: its dtype's name; that of the key data where it is an array of keys.
        tiles: pieces; together they cover the array, none twice.
        key: name of the random number generator where it is an array of keys, else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    tiles: tuple[Tile, ...]
    key: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all tiles."""
        return sum(t.data.nbytes for t in self.tiles)

    def whole(self) -> np.ndarray[Any, Any]:
        """The array on the host."""
        return self.region(tuple(slice(0, n) for n in self.shape))

    def array(self) -> Any:
        """The array: on the host, or on the default device where it is one of keys."""
        whole = self.whole()
        return jax.random.wrap_key_data(jnp.asarray(whole), impl=self.key) if self.key else whole

    def region(self, index: Sequence[slice]) -> np.ndarray[Any, Any]:
        """A part of the array, put together from the tiles that it touches.

        Args:
            index: a slice for each dim.

        Raises:
            ValueError: tiles are missing.
        """
        start = tuple(s.start or 0 for s in index)
        stop = tuple(n if s.stop is None else s.stop for s, n in zip(index, self.shape, strict=True))
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        for tile in self.tiles:
            if tile.start == start and tile.data.shape == size:
                return tile.data
        region = np.empty(size, jnp.dtype(self.dtype))
        filled = 0
        for tile in self.tiles:
            low = [max(a, t) for a, t in zip(start, tile.start, strict=True)]
            high = [min(b, t + n) for b, t, n in zip(stop, tile.start, tile.data.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                into = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
                of = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, tile.start, strict=True))
                region[into] = tile.data[of]
                filled += region[into].size
        if filled < region.size:
            raise ValueError(f"tiles of {self.shape} fill {filled} of {region.size} elements of a part")
        return region


def tiled_part(tiled: Tiled, index: tuple[slice, ...]) -> Tiled:
    """A part of an array that is one tile.

    Args:
        tiled: the array.
        index: slices of its first dims.
    """
    data = np.ascontiguousarray(tiled.whole()[index])
    return Tiled(data.shape, tiled.dtype, (Tile((0,) * data.ndim, data),), tiled.key)


def is_key(array: Any) -> bool:
    """Whether these are typed keys of a random number generator."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def list_shards(array: Any) -> None:
    """Has jax list the shards of an array before it is handed to another thread.

    jax lists them when they are first asked for, without a lock: of two threads that ask at the same time one may get
    some of the shards only, and who asks later gets some of them twice.

    Args:
        array: a `jax.Array`; nothing is done with others.
    """
    if isinstance(array, jax.Array):
        _ = (jax.random.key_data(array) if is_key(array) else array).addressable_shards


def tiles_of(array: Any) -> Tiled:
    """The distinct pieces of an array that this process holds, on the host. Waits until it is computed.

    Args:
        array: a `jax.Array`, or what numpy takes.

    Raises:
        ValueError: jax has listed some of its shards only; see `list_shards`.
    """
    key = ""
    if not isinstance(array, jax.Array):
        host = np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array))
        return Tiled(host.shape, host.dtype.name, (Tile((0,) * host.ndim, host),))
    if is_key(array):
        key, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
    tiles = []
    shards = {s.device: s for s in array.addressable_shards}
    count = len(array.sharding.addressable_devices)
    if len(shards) != count:
        raise ValueError(f"jax lists {len(shards)} of {count} shards of an array of {array.shape}")
    for shard in shards.values():
        if shard.replica_id == 0:
            start = tuple(s.start or 0 for s in shard.index)
            data = np.asarray(shard.data)
            tiles.append(Tile(start, data if data.flags.c_contiguous else np.ascontiguousarray(data)))
    return Tiled(tuple(array.shape), array.dtype.name, tuple(tiles), key)


def device_boxes(sharding: NamedSharding, shape: Sequence[int]) -> dict[jax.Device, Box]:
    """Boxes of an array of a shape on each device of this process."""
    boxes: dict[jax.Device, Box] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        slices = (*(index or ()), *(slice(None),) * (len(shape) - len(index or ())))
        boxes[device] = tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))
    return boxes


def placed(tiled: Tiled, sharding: NamedSharding) -> Any:
    """The array of these tiles, layouts as ``sharding`` says on devices of this process.

    Args:
        tiled: tiles that cover all parts of devices of this process.
        sharding: of the array as its users see it; typed keys have no dim for their data.
    """
    if tiled.key:
        data = placed(Tiled(tiled.shape, tiled.dtype, tiled.tiles), sharding)
        return jax.random.wrap_key_data(data, impl=tiled.key)
    if sharding.is_fully_addressable:
        return jax.device_put(tiled.whole(), sharding)
    cut: dict[Box, np.ndarray[Any, Any]] = {}
    buffers = []
    for device, at in device_boxes(sharding, tiled.shape).items():
        if at not in cut:
            cut[at] = tiled.region([slice(a, b) for a, b in at])
        buffers.append(jax.device_put(cut[at], SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    return jax.make_array_from_single_device_arrays(tiled.shape, sharding, buffers, dtype=jnp.dtype(tiled.dtype))


def taken_as_it_is(array: Any, sharding: NamedSharding) -> bool:
    """Whether a program whose argument is to lie like this takes an array from the host as it is."""
    return isinstance(array, np.ndarray) and array.nbytes <= SMALL_BYTES and sharding.is_fully_addressable


def moved(array: Any, sharding: NamedSharding) -> Any:
    """An array as ``sharding`` says; one on the host, or on one device, is the same on all processes of the mesh.

    Args:
        array: a `jax.Array`, or what numpy takes.
        sharding: of the array as its users see it.
    """
    if isinstance(array, jax.Array) and is_key(array) and not array.is_fully_addressable:
        # jax moves arrays between processes, but not typed keys.
        data = moved(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    everywhere = isinstance(array, jax.Array) and (sharding.is_fully_addressable or not array.is_fully_addressable)
    return jax.device_put(array, sharding) if everywhere else placed(tiles_of(array), sharding)


def joined(parts: Sequence[Tiled]) -> Tiled:
    """One array from the tiles that several processes hold of it."""
    first = parts[0]
    tiles = {t.start: t for p in parts for t in p.tiles}
    whole = Tiled(first.shape, first.dtype, tuple(tiles[s] for s in sorted(tiles)), first.key)
    wanted = math.prod(first.shape)
    if sum(t.data.size for t in whole.tiles) != wanted:
        raise ValueError(f"tiles of {whole.shape} hold {sum(t.data.size for t in whole.tiles)} elements, not {wanted}")
    return whole


def host_copy(array: Any) -> np.ndarray[Any, Any] | HostKeys:
    """A copy of an array on the host, in memory of its own.

    Args:
        array: one that is on the devices of this process, or whole on each of those of several.
    """
    if isinstance(array, jax.Array) and len(array.sharding.device_set) == 1 and not is_key(array):
        return np.array(array, copy=True, order="C")
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return on_host(tiles_of(array))
    if is_key(array):
        return HostKeys(str(jax.random.key_impl(array)), np.array(_own(jax.random.key_data(array))))
    return on_host(tiles_of(_own(array)))


def _own(array: jax.Array) -> Any:
    return array.addressable_data(0)


def on_host(tiled: Tiled) -> np.ndarray[Any, Any] | HostKeys:
    """The array of these tiles, in memory of its own."""
    whole = np.array(tiled.whole(), copy=True, order="C")
    return HostKeys(tiled.key, whole) if tiled.key else whole


def tiled_host(value: Any) -> Tiled:
    """The copy of `host_copy`, as tiles."""
    if isinstance(value, HostKeys):
        return replace(tiles_of(value.data), key=value.generator)
    return tiles_of(value)


def from_host(value: Any) -> Any:
    """The copy of `host_copy`, as an array; keys on the default device."""
    if isinstance(value, HostKeys):
        return jax.random.wrap_key_data(jnp.asarray(value.data), impl=value.generator)
    return value


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layout of an array on the devices of several processes, each with the next of the mesh's devices, row by row.

    Args:
        axes: (name, size) of the mesh's axes, major first.
        dims: mesh axes that split each dim of the array; dims after them are whole.
        processes: number of processes, a divisor of the mesh's size.
    """

    axes: tuple[tuple[str, int], ...]
    dims: tuple[tuple[str, ...], ...]
    processes: int

    def boxes(self, shape: Sequence[int], process: int) -> tuple[Box, ...]:
        """The different parts that the devices of one process hold, in order.

        Args:
            shape: shape of the array; the number of parts of a dim divides it.
            process: the process, from 0.
        """
        names = [name for name, _ in self.axes]
        sizes = dict(self.axes)
        process_devices = math.prod(sizes.values()) // self.processes
        places = itertools.product(*(range(size) for _, size in self.axes))
        boxes: dict[Box, None] = {}
        for place in itertools.islice(places, process * process_devices, (process + 1) * process_devices):
            at = dict(zip(names, place, strict=True))
            box = []
            for dim, size in enumerate(shape):
                index, count = 0, 1
                for axis in self.dims[dim] if dim < len(self.dims) else ():
                    index, count = index * sizes[axis] + at[axis], count * sizes[axis]
                box.append((index * (size // count), (index + 1) * (size // count)))
            boxes[tuple(box)] = None
        return tuple(sorted(boxes))


def cut(tiled: Tiled, boxes: Sequence[Box]) -> Tiled:
    """The parts of the tiles in some of ``boxes``, each piece once.

    Args:
        tiled: an array as tiles, or a part of it.
        boxes: parts of the array that have no element in common.
    """
    tiles = []
    for tile in tiled.tiles:
        for box in boxes:
            low = [max(a, t) for (a, _), t in zip(box, tile.start, strict=True)]
            high = [min(b, t + n) for (_, b), t, n in zip(box, tile.start, tile.data.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                of = tuple(slice(a - t, b - t) for a, b, t in zip(low, high, tile.start, strict=True))
                piece = tile.data[of]
                tiles.append(Tile(tuple(low), np.ascontiguousarray(piece).reshape(piece.shape)))
    return Tiled(tiled.shape, tiled.dtype, tuple(tiles), tiled.key)
