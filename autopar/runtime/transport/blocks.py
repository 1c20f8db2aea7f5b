"""Moves of blocks of an array from device to device, for another layout on other devices: `block_rounds`.

Both layouts cut the array evenly. Blocks are the largest pieces of which every shard of both is made. In a round each
device sends one block at most and receives one at most, as in a permute of XLA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: First index of a device's shard in each dim.
Corner = tuple[int, ...]


@dataclass(frozen=True)
class BlockMove:
    """A block on its way.

    Args:
        source: number of the device that has it.
        target: number of the device that gets it.
        source_at: first index of the block in the sender's shard, in each dim.
        target_at: likewise in the receiver's shard.
    """

    source: int
    target: int
    source_at: Corner
    target_at: Corner


@dataclass(frozen=True)
class BlockRounds:
    """All moves of an array.

    Args:
        block: shape of a block.
        rounds: moves of which no two share a sender or a receiver.
    """

    block: tuple[int, ...]
    rounds: tuple[tuple[BlockMove, ...], ...]


def block_rounds(
    source_shape: Sequence[int],
    sources: Mapping[int, Corner],
    target_shape: Sequence[int],
    targets: Mapping[int, Corner],
    processes: Sequence[int],
) -> BlockRounds:
    """The moves that put every device's shard together.

    A device takes a block from itself if it has it, else from its process, else from the device that gave the least so
    far.

    Args:
        source_shape: shape of a sender's shard.
        sources: by number of a sender where its shard begins.
        target_shape: shape of a receiver's shard.
        targets: by number of a receiver where its shard begins.
        processes: by number of a device its process.
    """
    block = tuple(math.gcd(a, b) for a, b in zip(source_shape, target_shape, strict=True))
    if 0 in block:
        return BlockRounds(block, ())
    owners: dict[Corner, list[int]] = {}
    for device, corner in sources.items():
        for inside in _corners(source_shape, block):
            owners.setdefault(_sum(corner, inside), []).append(device)
    gave = dict.fromkeys(sources, 0)
    moves: list[BlockMove] = []
    for device, corner in targets.items():
        for inside in _corners(target_shape, block):
            at = _sum(corner, inside)

            def rank(owner: int, device: int = device) -> tuple[bool, bool, int, int]:
                return owner != device, processes[owner] != processes[device], gave[owner], owner

            owner = min(owners[at], key=rank)
            gave[owner] += 1
            moves.append(BlockMove(owner, device, _difference(at, sources[owner]), inside))
    return BlockRounds(block, _dealt(moves))


def _dealt(moves: Sequence[BlockMove]) -> tuple[tuple[BlockMove, ...], ...]:
    """Each move in the first round in which its sender and its receiver have none."""
    rounds: list[list[BlockMove]] = []
    sends: list[set[int]] = []
    receives: list[set[int]] = []
    for move in moves:
        for n in range(len(rounds) + 1):
            if n == len(rounds):
                rounds.append([])
                sends.append(set())
                receives.append(set())
            if move.source not in sends[n] and move.target not in receives[n]:
                rounds[n].append(move)
                sends[n].add(move.source)
                receives[n].add(move.target)
                break
    return tuple(map(tuple, rounds))


def _corners(shape: Sequence[int], block: Sequence[int]) -> list[Corner]:
    return list(itertools.product(*(range(0, n, b) for n, b in zip(shape, block, strict=True))))


def _sum(a: Corner, b: Corner) -> Corner:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _difference(a: Corner, b: Corner) -> Corner:
    return tuple(x - y for x, y in zip(a, b, strict=True))
