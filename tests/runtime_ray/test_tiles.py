"""Arrays as tiles, and over a socket."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import ScheduleError
from autopar.runtime.transport import PeerLostError, SilentPeerError, SocketLink
from autopar.runtime.transport.base import StepAbortedError
from autopar.runtime.transport.channels import MOST_UNAUTHENTICATED, Credentials, Listener, dial
from autopar.runtime.transport.frames import read_frame, write_frame
from autopar.runtime.transport.tiles import placed, tiles_of

SPECS = [(), ("x",), (None, "x"), ("x", "y"), (("x", "y"),), ("y", "x"), (None, ("y", "x"))]


def mesh(first: int, shape: tuple[int, int]) -> Mesh:
    devices = np.array(jax.devices()[first : first + shape[0] * shape[1]], dtype=object).reshape(shape)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


#: Specs of an array here and there, shapes of the two meshes, dtype.
moves = given(
    st.sampled_from(SPECS),
    st.sampled_from(SPECS),
    st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    st.sampled_from([(2, 2), (4, 1), (1, 4), (2, 1)]),
    st.sampled_from(["float32", "bfloat16", "int32", "bool"]),
)


def assert_arrived(target, array, sharding) -> None:
    assert target.sharding == sharding
    assert target.dtype == array.dtype
    assert np.array_equal(np.asarray(target), np.asarray(array))


@pytest.mark.slow
@settings(max_examples=40)
@moves
def test_an_array_gets_from_any_mesh_to_any_other(of, to, shape, other, dtype) -> None:
    array = jnp.arange(64).reshape(8, 8).astype(dtype)
    source = jax.device_put(array, NamedSharding(mesh(0, shape), PartitionSpec(*of)))
    tiled = tiles_of(source)
    assert sum(t.data.size for t in tiled.tiles) == 64  # each distinct piece once
    sharding = NamedSharding(mesh(4, other), PartitionSpec(*to))
    assert_arrived(placed(tiled, sharding), array, sharding)


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3), np.zeros((0, 4)), np.arange(1 << 16), np.arange(12).reshape(3, 4).T, jnp.zeros(()),
        jnp.ones((3, 5), "bfloat16"),
    ],
    ids=["number", "empty", "long", "strided", "scalar", "bfloat16"],
)  # fmt: skip
def test_frames_bring_back_what_was_written(array) -> None:
    near, far = socket.socketpair()
    with near, far:
        writing = threading.Thread(target=write_frame, args=(near, 7, tiles_of(array)))
        writing.start()
        frame = read_frame(far)
        writing.join()
    came = frame.array
    assert (frame.step, frame.tag) == (0, 7)
    assert came.whole().dtype == np.asarray(array).dtype
    assert np.array_equal(came.whole(), np.asarray(array))


def test_typed_keys_stay_keys() -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    sharding = NamedSharding(mesh(0, (2, 2)), PartitionSpec("x"))
    back = placed(tiles_of(jax.device_put(keys, sharding)), NamedSharding(mesh(4, (4, 1)), PartitionSpec("x")))
    assert jnp.array_equal(jax.random.key_data(back), jax.random.key_data(keys))
    assert back.dtype == keys.dtype


@pytest.fixture
def pair():
    links = [SocketLink(n, b"0123456789abcdef") for n in range(2)]
    for link in links:
        link.connect({n: k.address for n, k in enumerate(links)}, ())
        link.begin(10)
    yield links
    for link in links:
        link.close()


def test_links_keep_the_order_and_check_tags(pair) -> None:
    a, b = pair
    for n in range(20):
        a.send(1, n, jnp.full(3, n))
    for n in range(19):
        assert b.receive(0, n, None).tolist() == [n] * 3
    with pytest.raises(ScheduleError, match="tag 19"):
        b.receive(0, 5, None)


def test_a_link_tells_of_silence_and_of_the_end(pair) -> None:
    a, b = pair
    b.begin(0.01)
    with pytest.raises(SilentPeerError, match="worker 0"):
        b.receive(0, 1, None)
    a.send(1, 0, jnp.zeros(2))
    b.begin(10)
    assert b.receive(0, 0, None).shape == (2,)
    a.close()
    with pytest.raises(PeerLostError):
        b.receive(0, 1, None)


def test_what_a_failed_step_left_is_dropped(pair) -> None:
    a, b = pair
    for step in (1, 2):
        a.begin(10, step)
        a.send(1, 0, jnp.full(3, step))
    b.begin(10, 2)
    assert b.receive(0, 0, None).tolist() == [2] * 3


def test_a_step_that_is_given_up_waits_no_longer(pair) -> None:
    _, b = pair
    b.begin(100, 3)
    given_up = threading.Timer(0.1, b.abort, (3,))
    b.ready(0)
    given_up.start()
    with pytest.raises(StepAbortedError, match="step 3"):
        b.receive(0, 0, None)
    with pytest.raises(StepAbortedError, match="step 3"):
        b.receive(0, 1, None)


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed a connection over which nothing was sent."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_idle_strangers_are_sent_away_and_are_few() -> None:
    served: list[bytes] = []
    listener = Listener(Credentials(b"secret"), lambda c: served.append(c.recv(2)), handshake_s=0.2)
    strangers = [socket.create_connection(listener.address) for _ in range(MOST_UNAUTHENTICATED + 20)]
    try:
        with dial(listener.address, Credentials(b"secret")) as friend:
            friend.sendall(b"hi")
            assert friend.recv(1) == b""  # it was served to its end
        assert served == [b"hi"]
        assert sum(map(is_open, strangers)) <= MOST_UNAUTHENTICATED  # all were accepted before the friend
        for stranger in strangers:
            stranger.settimeout(30)
            assert stranger.recv(1) == b""
    finally:
        listener.close()
        for stranger in strangers:
            stranger.close()


def test_strangers_are_not_heard(pair) -> None:
    _, b = pair
    with socket.create_connection(b.address) as stranger:
        stranger.sendall(b"f" * 16 + b"\0\0\0\0")
        assert stranger.recv(1) == b""


def test_links_listen_on_loopback(pair) -> None:
    assert {link.address[0] for link in pair} == {"127.0.0.1"}


def test_accepting_goes_on_when_descriptors_ran_out() -> None:
    """A friend that comes while there is no descriptor is served when there is one again."""
    served: list[bytes] = []
    listener = Listener(Credentials(b"secret"), lambda c: served.append(c.recv(2)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket() as first, socket.socket() as friend:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, limits[1]))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(friend.fileno()))
            first.connect(listener.address)  # for it the listener had taken a descriptor already
            friend.connect(listener.address)
            friend.sendall(b"secrethi")
            time.sleep(0.2)
            assert served == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in taken:
                os.close(descriptor)
        until = time.monotonic() + 20
        while not served and time.monotonic() < until:
            time.sleep(0.01)
    listener.close()
    assert served == [b"hi"]
