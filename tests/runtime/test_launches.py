"""Which programs wait for which on the devices of one process."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.runtime.launches import Launches


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[list[jax.Array]]:
    """What was waited for, launch by launch."""
    calls: list[list[jax.Array]] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: calls.append(list(arrays)))
    return calls


def spread(size: int) -> jax.Array:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return jax.device_put(jnp.zeros((8, size)), NamedSharding(mesh, PartitionSpec("x")))


def launch(launches: Launches, program: object, results: list[jax.Array]) -> None:
    with launches.of(program):
        launches.launched(results)


def test_another_program_waits_for_the_smallest_result(awaited: list[list[jax.Array]]) -> None:
    launches, first, second = Launches(), object(), object()
    small, large = spread(1), spread(64)
    launch(launches, first, [large, small])
    launch(launches, second, [large])
    launch(launches, first, [])
    assert [[id(a) for a in arrays] for arrays in awaited] == [[], [id(small)], [id(large)]]


def test_the_same_program_of_the_same_thread_does_not_wait(awaited: list[list[jax.Array]]) -> None:
    launches, program = Launches(), object()
    for _ in range(3):
        launch(launches, program, [spread(1)])
    assert awaited == [[]]


def test_another_thread_waits(awaited: list[list[jax.Array]]) -> None:
    launches, program, array = Launches(), object(), spread(1)
    launch(launches, program, [array])
    thread = threading.Thread(target=lambda: launch(launches, program, []))
    thread.start()
    thread.join()
    assert [[id(a) for a in arrays] for arrays in awaited] == [[], [id(array)]]


def test_what_was_given_up_is_not_waited_for(awaited: list[list[jax.Array]]) -> None:
    launches, array = Launches(), spread(1)
    launch(launches, object(), [array])
    array.delete()
    launch(launches, object(), [])
    assert awaited[1:] == [[]]
