"""Blocks of an array between two layouts: every element arrives, and no device has two moves in a round."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.runtime.transport.permutes import Corner, block_rounds


def shards(
    shape: tuple[int, ...], splits: tuple[int, ...], devices: list[int]
) -> tuple[tuple[int, ...], dict[int, Corner]]:
    """The shape of a shard, and by device where its shard begins: devices beyond the splits have copies."""
    size = tuple(n // k for n, k in zip(shape, splits, strict=True))
    corners = list(itertools.product(*(range(0, n, s) for n, s in zip(shape, size, strict=True))))
    return size, {d: corners[n % len(corners)] for n, d in enumerate(devices)}


@pytest.mark.parametrize("seed", range(30))
def test_every_shard_is_put_together(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([12, 24]) for _ in range(draw.choice([1, 2, 3])))
    everyone = list(range(8))
    sides = []
    for _ in range(2):
        splits = tuple(draw.choice([1, 2, 3]) for _ in shape)
        devices = draw.sample(everyone, draw.choice([n for n in range(1, 9)]))
        least = int(np.prod(splits))
        sides.append(shards(shape, splits if len(devices) >= least else (1,) * len(shape), sorted(devices)))
    (have, sources), (want, targets) = sides
    processes = [n // 4 for n in everyone]
    rounds = block_rounds(have, sources, want, targets, processes)
    array = np.arange(np.prod(shape)).reshape(shape)
    got = {d: np.full(want, -1) for d in targets}
    for moves in rounds.rounds:
        assert len({m.source for m in moves}) == len({m.target for m in moves}) == len(moves)
        for m in moves:
            corner = sources[m.source]
            shard = array[tuple(slice(c, c + n) for c, n in zip(corner, have, strict=True))]
            block = shard[tuple(slice(c, c + n) for c, n in zip(m.source_at, rounds.block, strict=True))]
            into = got[m.target][tuple(slice(c, c + n) for c, n in zip(m.target_at, rounds.block, strict=True))]
            assert block.shape == into.shape and (into == -1).all()
            into[...] = block
    for d, corner in targets.items():
        np.testing.assert_array_equal(got[d], array[tuple(slice(c, c + n) for c, n in zip(corner, want, strict=True))])


def test_devices_with_the_same_shard_send_it_once_each() -> None:
    rounds = block_rounds(
        (8,), dict.fromkeys(range(4), (0,)), (8,), dict.fromkeys(range(4, 8), (0,)), [0] * 4 + [1] * 4
    )
    assert [[(m.source, m.target) for m in r] for r in rounds.rounds] == [[(0, 4), (1, 5), (2, 6), (3, 7)]]


def test_a_device_keeps_what_it_has() -> None:
    rounds = block_rounds((8,), {0: (0,), 1: (0,)}, (4,), {1: (0,), 2: (4,)}, [0, 0, 1])
    assert sorted((m.source, m.target) for r in rounds.rounds for m in r) == [(0, 2), (1, 1)]


def test_nothing_is_moved_of_an_array_without_elements() -> None:
    assert block_rounds((0, 3), {0: (0, 0)}, (0, 3), {1: (0, 0)}, [0, 1]).rounds == ()
