"""Workers of several processes: who holds what, and pieces that go from each to each."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.runtime.transport import SocketLink
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from autopar.runtime.transport.tiles import ShardLayout, Tiled, cut, joined, tiles_of

DIMS = [(), (("x",),), ((), ("x",)), (("x",), ("y",)), (("x", "y"),), (("y",), ("x",)), ((), ("y", "x"))]


@settings(max_examples=60)
@given(st.sampled_from(DIMS), st.sampled_from([(2, 2), (4, 1), (1, 4), (2, 4)]), st.sampled_from([1, 2, 4]))
def test_processes_hold_what_jax_puts_on_their_devices(dims, sizes, processes) -> None:
    devices = np.array(jax.devices()[: math.prod(sizes)], dtype=object)
    mesh = Mesh(devices.reshape(sizes), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*(d or None for d in dims)))
    layouts = ShardLayout((("x", sizes[0]), ("y", sizes[1])), dims, processes)
    parts = []
    array = jnp.arange(64).reshape(8, 8)
    for process, own in enumerate(np.split(devices, processes)):
        held = {
            tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, (8, 8), strict=True))
            for device, index in sharding.devices_indices_map((8, 8)).items()
            if device in own
        }
        boxes = layouts.boxes((8, 8), process)
        assert set(boxes) == held
        parts.append(cut(tiles_of(array), boxes))
    assert np.array_equal(joined(parts).whole(), array)


def test_teams_count_processes() -> None:
    groups = ProcessGroups((2, 1, 2))
    assert groups.num_processes == 5
    assert groups.workers == (0, 0, 1, 2, 2)
    assert [list(groups.members(w)) for w in range(3)] == [[0, 1], [2], [3, 4]]
    assert [groups.rank(p) for p in range(5)] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("key", [False, True])
def test_every_process_gets_what_its_devices_hold(key: bool) -> None:
    """Worker 0 is one process, worker 1 two, worker 2 one: there and on."""
    groups = ProcessGroups((1, 2, 1))
    links = [SocketLink(p, b"secret", "127.0.0.1") for p in range(4)]
    addresses = {p: link.address for p, link in enumerate(links)}
    layouts = {1: {"v": ShardLayout((("x", 2),), (("x",),), 2)}}
    ends = [GroupLink(link, groups, layouts) for link in links]
    array = jax.random.split(jax.random.key(0), 4) if key else jnp.arange(8.0).reshape(4, 2)
    data = np.asarray(jax.random.key_data(array) if key else array)
    try:
        for link in links:
            link.connect(addresses, ())
        ends[0].send(1, 5, array, "v")
        parts: list[Tiled] = [links[p].receive_shards(0, 5) for p in (1, 2)]
        assert [p.bytes for p in parts] == [data.nbytes // 2] * 2
        assert [t.start for p in parts for t in p.tiles] == [(0, 0), (2, 0)]
        for rank, process in enumerate((1, 2)):  # as if each had its half alone
            links[process].send_shards(3, 6, array, lambda s, r=rank: layouts[1]["v"].boxes(s, r))
        got = ends[3].receive(1, 6, NamedSharding(jax.make_mesh((1,), ("z",)), PartitionSpec()))
        assert np.array_equal(jax.random.key_data(got) if key else got, data)
        ends[0].send(1, 7, array, "unknown")
        assert all(links[p].receive_shards(0, 7).bytes == data.nbytes for p in (1, 2))
    finally:
        for link in links:
            link.close()
