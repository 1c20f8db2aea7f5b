"""Whether the list of a checkpoint can be true: shapes, types and places of its arrays, against its files.

A list may come from anywhere. What it says must neither read outside of the checkpoint, nor take more memory than its
files have bytes, nor leave a part of an array unwritten.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.shards import DamageError, Leaf, Shard, open_plain

_LIST = "checkpoint.json"
_MOST_DIMS = 64
#: Cells of the grid that the boundaries of an array's pieces make.
_MOST_CELLS = 1 << 22


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
