"""Which thread has jax list the shards of an array: jax has no lock there, and a second thread may get some only."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.ray.arrays import ArrayStore
from autopar.runtime.ray.messages import FileResult, Snapshot, Start, decode, encode
from autopar.runtime.shards import Leaf, Shard, leaf_of
from autopar.runtime.transport import SocketLink
from autopar.runtime.transport.tiles import Tile, Tiled, placed, tiles_of


def split() -> Any:
    mesh = Mesh(np.array(jax.devices()[:2], dtype=object), ("x",))
    return jax.device_put(jnp.arange(256.0).reshape(16, 16), NamedSharding(mesh, PartitionSpec(None, "x")))


@pytest.fixture
def first_asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """By id of an array the name of the thread that asked for its shards first."""
    kind = type(split())
    shards, by = kind.addressable_shards.fget, dict[int, str]()

    def asked(array: Any) -> Any:
        by.setdefault(id(array), threading.current_thread().name)
        return shards(array)

    monkeypatch.setattr(kind, "addressable_shards", property(asked))
    return by


@pytest.mark.parametrize("is_key", [False, True])
def test_shards_of_a_snapshot_are_listed_before_another_thread_writes_it(
    first_asked: dict[int, str], tmp_path: Path, is_key: bool
) -> None:
    store, array = ArrayStore({}), jax.random.key(3) if is_key else split()
    store.update({1: array})
    store.hold(encode(Snapshot(7, {1: "w"})))
    results: list[bytes] = []
    writing = threading.Thread(target=lambda: results.append(store.write(7, str(tmp_path / "a.bin"))))
    writing.start()
    writing.join()
    assert leaf_of("w", [decode(results[0], FileResult).written["w"]]).shape == ((2,) if is_key else (16, 16))
    assert first_asked[id(jax.random.key_data(array) if is_key else array)] == threading.current_thread().name


def test_shards_of_what_is_sent_are_listed_before_it_is_sent(first_asked: dict[int, str]) -> None:
    links = [SocketLink(n, b"0123456789abcdef") for n in range(3)]
    array = split()
    try:
        for link in links:
            link.connect({n: k.address for n, k in enumerate(links)}, ())
            link.begin(10)
        for to in (1, 2):
            links[0].send(to, 0, array)
        for link in links[1:]:
            assert np.array_equal(link.receive(0, 0, None), np.asarray(array))
    finally:
        for link in links:
            link.close()
    assert first_asked[id(array)] == threading.current_thread().name


def test_shards_that_jax_lists_twice_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    array = split()
    twice = [s for shard in array.addressable_shards for s in (shard, shard)]
    monkeypatch.setattr(type(array), "addressable_shards", property(lambda _: twice))
    assert [t.start for t in tiles_of(array).tiles] == [(0, 0), (0, 8)]


def test_a_list_of_some_shards_is_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    array = split()
    first = list(array.addressable_shards)[:1]
    monkeypatch.setattr(type(array), "addressable_shards", property(lambda _: first))
    with pytest.raises(ValueError, match=r"jax lists 1 of 2 shards of an array of \(16, 16\)"):
        tiles_of(array)


def test_parts_without_tiles_are_not_filled_with_anything() -> None:
    array = split()
    half = Tiled((16, 16), "float32", (Tile((0, 0), np.ones((16, 8), "float32")),))
    with pytest.raises(ValueError, match=r"tiles of \(16, 16\) fill 128 of 256 elements"):
        half.whole()
    with pytest.raises(ValueError, match="fill"):
        placed(half, array.sharding)


def test_what_was_written_too_often_is_listed() -> None:
    pieces = [Shard("pipeline-0-process-0001.bin", at, (0, 8), (16, 8), 0) for at in (0, 512)]
    written = Leaf("w", (16, 16), "float32", (Shard("pipeline-0-process-0000.bin", 0, (0, 0), (16, 8), 0), *pieces))
    with pytest.raises(ValueError, match=r"384 elements were written: .*at \(0, 8\) in pipeline-0-process-0001.bin"):
        leaf_of("w", [written])


def test_microbatches_are_copies_of_what_the_driver_sent() -> None:
    """The driver's next message may lie where this one does."""
    sent, loaded = np.arange(8.0).reshape(4, 2), SimpleNamespace(placements={})
    pieces = list(ArrayStore({}).start(loaded, [Start("x", 1, (0, 1), 0, 2)], {1: sent}).values())  # type: ignore[arg-type]
    assert [np.asarray(p).tolist() for p in pieces] == [sent[:2].tolist(), sent[2:].tolist()]
    assert not any(np.shares_memory(sent, p) for p in pieces)
