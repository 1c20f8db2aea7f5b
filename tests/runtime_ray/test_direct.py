"""Arrays that are pulled from device to device arrive as those that go by way of the host."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import NamedSharding, PartitionSpec

from autopar.runtime.transport import SocketLink
from autopar.runtime.transport.direct import Offered, Transfers, merged
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from autopar.runtime.transport.tiles import ShardLayout, Tiled, tiles_of
from tests.runtime_ray.test_tiles import assert_arrived, mesh, moves

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ends():
    return Transfers("127.0.0.1"), Transfers("127.0.0.1")


@pytest.fixture
def links(ends):
    made = [SocketLink(n, b"0123456789abcdef") for n in range(2)]
    for link, transfers in zip(made, ends, strict=True):
        link.transfers = transfers
        link.connect({n: k.address for n, k in enumerate(made)}, ())
        link.begin(10)
    yield made
    for link in made:
        link.close()


@settings(max_examples=40, deadline=None)
@moves
def test_an_array_gets_from_any_mesh_to_any_other(ends, of, to, shape, other, dtype) -> None:
    array = jnp.arange(64).reshape(8, 8).astype(dtype)
    offered = ends[0].offer(jax.device_put(array, NamedSharding(mesh(0, shape), PartitionSpec(*of))))
    assert sum(math.prod(p.shape) for p in offered.shards) == 64  # each distinct piece once
    sharding = NamedSharding(mesh(4, other), PartitionSpec(*to))
    assert_arrived(ends[1].laid(offered, sharding), array, sharding)


def test_typed_keys_stay_keys(ends) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), NamedSharding(mesh(0, (2, 2)), PartitionSpec("x")))
    back = ends[1].laid(ends[0].offer(keys), NamedSharding(mesh(4, (4, 1)), PartitionSpec("x")))
    assert back.dtype == keys.dtype
    assert np.array_equal(np.asarray(jax.random.key_data(back)), np.asarray(jax.random.key_data(keys)))


@pytest.mark.parametrize("array", [np.arange(6.0), jnp.zeros((0, 4))], ids=["on the host", "empty"])
def test_what_cannot_be_pulled_is_sent(ends, links, array) -> None:
    assert ends[0].offer(array) is None
    links[0].send(1, 3, array)
    assert isinstance(came := links[1].receive_shards(0, 3), Tiled)
    assert np.array_equal(came.whole(), np.asarray(array))


def test_links_tell_where_arrays_are_and_keep_the_order(links) -> None:
    sharding = NamedSharding(mesh(4, (2, 2)), PartitionSpec("x"))
    for n in range(10):
        links[0].send(1, n, jnp.full((4, 2), float(n)))
    for n in range(8):
        assert np.array_equal(links[1].receive(0, n, sharding), np.full((4, 2), float(n)))
    assert isinstance(came := links[1].receive_shards(0, 8), Offered)
    assert np.array_equal(links[1].laid([came], None), np.full((4, 2), 8.0))
    assert np.array_equal(links[1].receive(0, 9, None), np.full((4, 2), 9.0))


@pytest.mark.slow
def test_what_is_not_computed_yet_is_pulled_when_it_is(links) -> None:
    x = jax.random.normal(jax.random.key(0), (700, 700))
    made = jax.jit(lambda x: x @ jnp.sin(x) @ x)(x)
    links[0].send(1, 0, made)
    assert np.array_equal(links[1].receive(0, 0, None), made)


def test_processes_pull_what_their_devices_hold(links) -> None:
    """One process sends to a worker of two, of which this is the second."""
    layouts = {1: {"v": ShardLayout((("x", 2),), (("x",),), 2)}}
    array = jnp.arange(8.0).reshape(4, 2)
    GroupLink(links[0], ProcessGroups((1, 1)), {}).send(1, 4, array, "v")
    links[1].receive_shards(0, 4)
    links[0].send_shards(1, 5, array, lambda shape: layouts[1]["v"].boxes(shape, 1))
    came = links[1].receive_shards(0, 5)
    assert [p.start for p in came.shards] == [(2, 0)]
    assert np.array_equal(links[1].transfers.on_host(came).tiles[0].data, array[2:])


def test_parts_that_came_either_way_are_one_array(ends) -> None:
    array = jnp.arange(8.0).reshape(4, 2)
    upper = ends[0].offer(array, lambda shape: (((0, 2), (0, 2)),))
    lower = Tiled((4, 2), "float32", tuple(tiles_of(array[2:]).tiles))
    lower = Tiled((4, 2), "float32", (type(lower.tiles[0])((2, 0), lower.tiles[0].data),))
    assert np.array_equal(merged([upper, lower], ends[1]).whole(), array)
    nothing = Tiled((4, 2), "float32", ())
    whole = merged([nothing, ends[0].offer(array)], ends[1])
    assert isinstance(whole, Offered)
    assert np.array_equal(ends[1].on_host(whole).whole(), array)


def test_arrays_are_kept_for_two_steps(ends) -> None:
    one = Transfers("127.0.0.1")
    offered = one.offer(jnp.arange(3.0))
    one.next_step()
    assert np.array_equal(ends[1].on_host(offered).whole(), np.arange(3.0))
    one.next_step()
    assert one._kept == [[], []]


@pytest.mark.slow
def test_a_pull_has_a_deadline_and_names_the_sender() -> None:
    """In a process of its own: a pull that never ends keeps its devices busy until the process does."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime_ray.silent_sender"],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "XLA_FLAGS": "",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["SilentPeerError", "0"]


def test_a_step_ends_when_its_typed_keys_are_computed(links) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    links[0].send(1, 3, keys)
    came = links[1].receive(0, 3, NamedSharding(mesh(4, (4, 1)), PartitionSpec("x")))
    links[1].finish([came, jnp.zeros(3)])
    assert np.array_equal(np.asarray(jax.random.key_data(came)), np.asarray(jax.random.key_data(keys)))


@pytest.mark.slow
def test_what_was_pulled_in_time_is_finished_late(ends, links) -> None:
    links[0].send(1, 3, jnp.arange(8.0))
    array = links[1].receive(0, 3, NamedSharding(mesh(4, (2, 2)), PartitionSpec()))
    jax.block_until_ready(array)
    links[1].begin(0.0)
    made = array * 2
    links[1].finish([made])
    assert np.array_equal(np.asarray(made), 2 * np.arange(8.0))
