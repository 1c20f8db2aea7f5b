"""Parts of an array that the processes of a worker hold, computed without devices, so that a sender knows them too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from autopar.runtime.transport.tiles import Box, Tile, Tiled


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layout of an array on the devices of several processes, each with the next of the mesh's devices, row by row.

    Args:
        axes: (name, size) of the mesh's axes, major first.
        dims: mesh axes that split each dim of the array; dims behind them are whole.
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
