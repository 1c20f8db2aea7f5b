"""`ArrayStore`: the arrays that a worker's process keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.lower.pipeline.exported import run_maker
from autopar.runtime.ray.loaded import LoadedFunction
from autopar.runtime.ray.messages import FileResult, ReadRequest, Snapshot, Start, decode, encode
from autopar.runtime.shards import DamageError, Leaf, read_boxes, write_shards
from autopar.runtime.transport.tiles import (
    SMALL_BYTES,
    Tiled,
    device_boxes,
    list_shards,
    moved,
    on_host,
    placed,
    tiled_host,
    tiled_part,
    tiles_of,
)
from autopar.schedule import NONE, Buffer


class ArrayStore:
    """Arrays by number.

    Args:
        functions: that the process has loaded, by number.
    """

    def __init__(self, functions: Mapping[int, LoadedFunction]) -> None:
        self._functions = functions
        self._arrays: dict[int, Any] = {}
        self._snapshots: dict[int, dict[str, Any]] = {}

    def __getitem__(self, id: int) -> Any:
        return self._arrays[id]

    def update(self, arrays: Mapping[int, Any]) -> None:
        """Keeps arrays under their numbers."""
        self._arrays.update(arrays)

    def forget(self, ids: Sequence[int]) -> int:
        """Drops arrays; returns how many are left."""
        for id in ids:
            self._arrays.pop(id, None)
        return len(self._arrays)

    def put(self, function: int, arrays: Mapping[int, Any], values: Mapping[int, str]) -> None:
        """Keeps arrays from the host.

        Args:
            function: that is to read them.
            arrays: by number; key data where it is of keys.
            values: name of the value that each is going to be; it is laid out as the programs take that.
        """
        loaded = self._functions[function]
        with jax.enable_x64(loaded.x64):
            for id, array in arrays.items():
                self._arrays[id] = laid_out(loaded.placements.get(values[id]), tiled_host(array))

    def make(
        self, function: int, code: bytes, arguments: Sequence[Any], ids: Sequence[int], values: Sequence[str]
    ) -> None:
        """Keeps arrays that an exported function makes.

        Args:
            function: that is to read them.
            code: the exported function.
            arguments: its arguments, on the host.
            ids: numbers of its results.
            values: name of the value that each is going to be.
        """
        if not ids:
            return
        loaded = self._functions[function]
        with jax.enable_x64(loaded.x64):
            shardings = [loaded.placements[v] for v in values]
            whole = NamedSharding(shardings[0].mesh, PartitionSpec())
            arrays = run_maker(code, [placed(tiled_host(a), whole) for a in arguments], shardings)
        self._arrays.update(zip(ids, arrays, strict=True))

    def get(self, ids: Sequence[int]) -> dict[int, Tiled]:
        """Parts of arrays that this process has and no other of its worker gives, on the host, by number."""
        return {id: tiles_of(self._arrays[id]) for id in ids}

    def hold(self, message: bytes) -> None:
        """Keeps the arrays of a `Snapshot` for `write`."""
        snapshot = decode(message, Snapshot)
        for id in snapshot.names:
            list_shards(self._arrays[id])  # `write` reads them while steps do
        self._snapshots[snapshot.ticket] = {name: self._arrays[id] for id, name in snapshot.names.items()}

    def write(self, ticket: int, path: str) -> bytes:
        """Writes what this process has of the arrays of a snapshot; a step may run meanwhile.

        Args:
            ticket: of the `Snapshot`.
            path: the file.

        Returns a `FileResult`.
        """
        held = self._snapshots.pop(ticket)
        if not held:
            return encode(FileResult())
        try:
            return encode(FileResult(write_shards(Path(path), ((n, tiles_of(a)) for n, a in sorted(held.items())))))
        except OSError as error:
            return encode(FileResult(file=path, error=str(error)))

    def read(self, message: bytes) -> bytes:
        """Keeps the arrays of a `ReadRequest`: of each what lies on the devices of this process.

        Returns a `FileResult`.
        """
        request = decode(message, ReadRequest)
        try:
            for id, leaf in request.leaves.items():
                like = getattr(self._arrays.get(request.like[id]), "sharding", None)
                with jax.enable_x64(leaf.dtype in _WIDE):
                    self._arrays[id] = _read_leaf(Path(request.folder), leaf, like)
        except DamageError as error:
            return encode(FileResult(file=error.file, error=str(error)))
        return encode(FileResult())

    def start(self, loaded: LoadedFunction, starts: Sequence[Start], given: Mapping[int, Any]) -> dict[Buffer, Any]:
        """Values of this process at the beginning of a step.

        Args:
            loaded: what runs.
            starts: which arrays are which values.
            given: arrays on the host, by number, that the driver sent along.
        """
        buffers: dict[Buffer, Any] = {}
        for s in starts:
            wanted = loaded.placements.get(s.value)
            array = tiled_host(given[s.id]) if s.id in given else self._arrays[s.id]
            if not s.microbatches:
                buffer, laid = s.buffer or Buffer(s.value), laid_out(wanted, array)
                # Totals are written over, and a step may be run again.
                buffers[buffer] = laid if buffer.origin == NONE else jnp.copy(laid)
                continue
            size = array.shape[s.dim] // s.count
            is_small = isinstance(array, Tiled) and not array.key and array.bytes <= SMALL_BYTES * s.count
            if is_small and (wanted is None or wanted.is_fully_addressable):
                # The programs that read them put them on devices with the call, which is quicker than doing so before.
                whole = array.whole().copy()
                for k in s.microbatches:
                    part = whole[(slice(None),) * s.dim + (slice(k * size, (k + 1) * size),)]
                    buffers[Buffer(s.value, s.first + k)] = np.ascontiguousarray(part)
                continue
            for k in s.microbatches:
                index = (slice(None),) * s.dim + (slice(k * size, (k + 1) * size),)
                part = tiled_part(array, index) if isinstance(array, Tiled) else array[index]
                buffers[Buffer(s.value, s.first + k)] = laid_out(wanted, part)
        return buffers


_WIDE = ("float64", "int64", "uint64", "complex128")


def laid_out(wanted: NamedSharding | None, array: Any) -> Any:
    """An array as a program takes it.

    Args:
        wanted: how; None leaves it as it is.
        array: on devices, or tiles on the host.
    """
    if isinstance(array, Tiled):
        # A copy: the array may lie in memory that others reuse.
        tiled = tiled_host(on_host(array))
        return tiled.array() if wanted is None else placed(tiled, wanted)
    lies = getattr(array, "sharding", None)
    return array if wanted is None or lies == wanted else moved(array, wanted)


def _read_leaf(folder: Path, leaf: Leaf, sharding: NamedSharding | None) -> Any:
    if sharding is None:
        return read_boxes(folder, leaf, [tuple((0, n) for n in leaf.shape)]).array()
    boxes = dict.fromkeys(device_boxes(sharding, leaf.shape).values())
    return placed(read_boxes(folder, leaf, list(boxes)), sharding)
