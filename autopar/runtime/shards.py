"""Shards of arrays in files: what each process writes of a checkpoint, and how any part of an array is read back.

A process writes all its shards one after the other into one file. Where each shard lies in the file and in its array,
and its checksum, is reported to whoever writes the list of the checkpoint. Nothing is pickled.

`check_leaves` proves that a list can be true, as a list may come from anywhere. What it says must neither read outside
of the checkpoint, nor take more memory than its files have bytes, nor leave a part of an array unwritten.
"""

from __future__ import annotations

import math
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.runtime.transport.tiles import Box, Tile, Tiled

#: Pieces that an error lists at most.
_MOST_LISTED = 16
_LIST = "checkpoint.json"
_MOST_DIMS = 64
#: Cells of the grid that the boundaries of an array's pieces make.
_MOST_CELLS = 1 << 22


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rectangular piece of an array in a file.

    Args:
        file: name of the file, in the folder of the checkpoint.
        offset: bytes before it.
        start: index of its first element in the array.
        shape: its shape.
        checksum: CRC-32 of its bytes.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An array of a checkpoint, or the pieces of one that a process wrote.

    Args:
        path: in the tree; of what a process wrote its name there.
        shape: of the array; of the data where it is one of keys.
        dtype: likewise.
        shards: of an array of a checkpoint together they are it, without overlap.
        key: random number generator of keys, or empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...] = msgspec.field(name="pieces")
    key: str = ""

    def rows(self, first: int, count: int) -> Leaf:
        """The array of ``count`` indices of the first dim from ``first`` on; its pieces may reach beyond it."""
        moved = tuple(
            msgspec.structs.replace(p, start=(p.start[0] - first, *p.start[1:]))
            for p in self.shards
            if p.start[0] < first + count and p.start[0] + p.shape[0] > first
        )
        return msgspec.structs.replace(self, shape=(count, *self.shape[1:]), shards=moved)


class DamageError(Exception):
    """A file is not what was written; ``file`` is its name."""

    def __init__(self, file: str, reason: str) -> None:
        self.file = file
        super().__init__(reason)


def write_shards(path: Path, arrays: Iterable[tuple[str, Tiled]]) -> dict[str, Leaf]:
    """Writes pieces into a new file; returns when they are on disk.

    Args:
        path: the file.
        arrays: (name, its pieces that are written).

    Returns by name what was written. OSError where the disk is full, or the file there already.
    """
    written: dict[str, Leaf] = {}
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
        offset = 0
        for name, tiled in arrays:
            shards = []
            for tile in tiled.tiles:
                data = np.ascontiguousarray(tile.data).reshape(-1).view(np.uint8).data
                file.write(data)
                shards.append(Shard(path.name, offset, tile.start, tile.data.shape, zlib.crc32(data)))
                offset += len(data)
            written[name] = Leaf(name, tiled.shape, tiled.dtype, tuple(shards), tiled.key)
        file.flush()
        os.fsync(file.fileno())
    return written


def leaf_of(path: str, parts: Sequence[Leaf]) -> Leaf:
    """The leaf that several processes wrote.

    Args:
        path: in the tree.
        parts: what each of them wrote.

    Raises:
        ValueError: together it is not the whole array.
    """
    first = parts[0]
    shards = tuple(sorted((p for w in parts for p in w.shards), key=lambda p: p.start))
    count = sum(int(np.prod(p.shape, dtype=np.int64)) for p in shards)
    if count != int(np.prod(first.shape, dtype=np.int64)):
        listed = "; ".join(f"{p.shape} at {p.start} in {p.file} from byte {p.offset}" for p in shards[:_MOST_LISTED])
        raise ValueError(f"{path} has {first.shape}, of which {count} elements were written: {listed}")
    return Leaf(path, first.shape, first.dtype, shards, first.key)


def stacked(parts: Sequence[Leaf]) -> Leaf:
    """The written pieces of arrays that are one array along their first dim.

    Args:
        parts: in order; each is a part of the array that has its shape.
    """
    shards: list[Shard] = []
    first = 0
    for part in parts:
        shards += (msgspec.structs.replace(p, start=(p.start[0] + first, *p.start[1:])) for p in part.shards)
        first += part.shape[0]
    return msgspec.structs.replace(parts[0], shape=(first, *parts[0].shape[1:]), shards=tuple(shards))


def read_boxes(folder: Path, leaf: Leaf, boxes: Sequence[Box]) -> Tiled:
    """Parts of an array, as tiles. Of the files only pieces that these parts touch are read, and those are checked.

    Args:
        folder: of the checkpoint.
        leaf: the array.
        boxes: parts of it.

    Raises:
        DamageError: a file is not what was written.
    """
    cache: dict[int, np.ndarray[Any, Any]] = {}
    tiles = []
    for box in boxes:
        array = np.empty([b - a for a, b in box], jnp.dtype(leaf.dtype))
        filled = 0
        for number, piece in enumerate(leaf.shards):
            low = [max(a, s) for (a, _), s in zip(box, piece.start, strict=True)]
            high = [min(b, s + n) for (_, b), s, n in zip(box, piece.start, piece.shape, strict=True)]
            if not all(a < b for a, b in zip(low, high, strict=True)):
                continue
            if number not in cache:
                cache[number] = _read(folder, piece, leaf.dtype)
            into = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(low, high, box, strict=True))
            of = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, piece.start, strict=True))
            array[into] = cache[number][of]
            filled += array[into].size
        if filled != array.size:
            raise DamageError("checkpoint.json", f"pieces of {leaf.path} are missing")
        tiles.append(Tile(tuple(a for a, _ in box), array))
    return Tiled(leaf.shape, leaf.dtype, tuple(tiles), leaf.key)


def read_whole(folder: Path, leaf: Leaf) -> np.ndarray[Any, Any]:
    """An array, or the data of keys. Raises DamageError."""
    return read_boxes(folder, leaf, [tuple((0, n) for n in leaf.shape)]).tiles[0].data


def _read(folder: Path, piece: Shard, dtype: str) -> np.ndarray[Any, Any]:
    if Path(piece.file).name != piece.file:
        raise DamageError(piece.file, f"{piece.file!r} is outside of it")
    kind = jnp.dtype(dtype)
    size = math.prod(piece.shape) * kind.itemsize
    try:
        with open_plain(folder / piece.file) as file:
            file.seek(piece.offset)
            data = file.read(size)
    except OSError as error:
        raise DamageError(piece.file, str(error)) from error
    if len(data) != size or zlib.crc32(data) != piece.checksum:
        raise DamageError(piece.file, "the checksum is another" if len(data) == size else "it is cut off")
    return np.frombuffer(data, kind).reshape(piece.shape)


def open_plain(path: Path) -> BinaryIO:
    """Opens a file to read it. OSError where it is a link, or something else than a file; never waits for one."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(f"{path} is not a plain file")
    return file


def merged(parts: Sequence[Mapping[str, Leaf]]) -> dict[str, list[Leaf]]:
    """The written pieces of several processes, by name."""
    by_leaf: dict[str, list[Leaf]] = {}
    for part in parts:
        for name, written in part.items():
            by_leaf.setdefault(name, []).append(written)
    return by_leaf


def check_leaves(folder: Path, leaves: Sequence[Leaf]) -> None:
    """Raises DamageError where a list of arrays cannot be that of this folder.

    Args:
        folder: of the checkpoint.
        leaves: what its list says.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise DamageError(_LIST, f"{folder.name} is not a folder, or is a link to one")
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise DamageError(_LIST, "it names an array twice")
    used: dict[str, int] = {}
    for leaf in leaves:
        size = _item_bytes(leaf)
        _check_shape(leaf)
        for piece in leaf.shards:
            if Path(piece.file).name != piece.file or piece.file in ("", ".", ".."):
                raise DamageError(_LIST, f"{piece.file!r} is outside of it")
            if piece.offset < 0:
                raise DamageError(_LIST, f"{leaf.path} is before the first byte of {piece.file}")
            used[piece.file] = used.get(piece.file, 0) + math.prod(piece.shape) * size
        _check_cover(leaf)
    for name, count in used.items():
        if count > _file_bytes(folder, name):
            raise DamageError(name, f"it is cut off: {count} bytes of arrays are to be in it")


def _item_bytes(leaf: Leaf) -> int:
    try:
        dtype = jnp.dtype(leaf.dtype)
    except TypeError as error:
        raise DamageError(_LIST, f"{leaf.path} has dtype {leaf.dtype[:40]!r}") from error
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise DamageError(_LIST, f"{leaf.path} has dtype {leaf.dtype[:40]!r}, which no array of jax has")
    if leaf.key:
        try:
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.key)))
        except (ValueError, TypeError) as error:
            raise DamageError(_LIST, f"{leaf.path} has keys of {leaf.key[:40]!r}") from error
        if dtype != data.dtype or leaf.shape[-len(data.shape) :] != data.shape:
            raise DamageError(_LIST, f"{leaf.path} has no keys of {leaf.key}")
    return int(dtype.itemsize)


def _check_shape(leaf: Leaf) -> None:
    if len(leaf.shape) > _MOST_DIMS or any(n < 0 for n in leaf.shape):
        raise DamageError(_LIST, f"{leaf.path} has shape {leaf.shape[:_MOST_DIMS]}")
    for piece in leaf.shards:
        inside = len(piece.start) == len(piece.shape) == len(leaf.shape) and all(
            start >= 0 and n >= 0 and start + n <= whole
            for start, n, whole in zip(piece.start, piece.shape, leaf.shape, strict=True)
        )
        if not inside:
            raise DamageError(_LIST, f"a piece of {leaf.path} is outside of the array")


def _check_cover(leaf: Leaf) -> None:
    """The pieces are the array: no element is in two of them, and none in no one."""
    filled = [p for p in leaf.shards if math.prod(p.shape)]
    if sum(math.prod(p.shape) for p in filled) != math.prod(leaf.shape):
        raise DamageError(_LIST, f"pieces of {leaf.path} are missing, or there are too many")
    if len(filled) < 2:
        return
    ends = [sorted({e for p in filled for e in (p.start[d], p.start[d] + p.shape[d])}) for d in range(len(leaf.shape))]
    if math.prod(len(e) for e in ends) > _MOST_CELLS:
        raise DamageError(_LIST, f"{leaf.path} is in pieces that no mesh makes")
    index = [{e: n for n, e in enumerate(ends_of_dim)} for ends_of_dim in ends]
    covered = np.zeros([max(1, len(e) - 1) for e in ends], bool)
    for piece in filled:
        cells = tuple(_cells(piece, d, index[d]) for d in range(len(leaf.shape)))
        if covered[cells].any():
            raise DamageError(_LIST, f"pieces of {leaf.path} overlap")
        covered[cells] = True


def _cells(piece: Shard, dim: int, index: dict[int, int]) -> slice:
    return slice(index[piece.start[dim]], index[piece.start[dim] + piece.shape[dim]])


def _file_bytes(folder: Path, name: str) -> int:
    try:
        with open_plain(folder / name) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DamageError(name, str(error)) from error
