"""Which programs wait for which on the devices of one process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.runtime.launches import Launches, few_at_once


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[list[jax.Array]]:
    """What was waited for, launch by launch."""
    calls: list[list[jax.Array]] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: calls.append(list(arrays)))
    return calls


class Program:
    """Stands for a program: that which is launched is all that counts here."""


def spread(size: int) -> jax.Array:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return jax.device_put(jnp.zeros((8, size)), NamedSharding(mesh, PartitionSpec("x")))


def launch(launches: Launches, program: Program, results: list[jax.Array]) -> None:
    with launches.of(program):
        launches.launched(results)


def test_another_program_waits_for_the_smallest_result(awaited: list[list[jax.Array]]) -> None:
    launches, first, second = Launches(), Program(), Program()
    small, large = spread(1), spread(64)
    launch(launches, first, [large, small])
    launch(launches, second, [large])
    launch(launches, first, [])
    assert [[id(a) for a in arrays] for arrays in awaited] == [[], [id(small)], [id(large)]]


def test_the_same_program_of_the_same_thread_does_not_wait(awaited: list[list[jax.Array]]) -> None:
    launches, program = Launches(), Program()
    for _ in range(3):
        launch(launches, program, [spread(1)])
    assert awaited == [[]]


def test_a_call_waits_for_the_call_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    step = autopar.parallelize(lambda w, x: (w + 1, (x * w).sum()), num_stages=1, mesh_shape=(8,), progress=False)
    w, x = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    (w, value), calls = step(w, x), []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: calls.append([id(a) for a in arrays]))
    before = [value]
    for _ in range(3):
        w, value = step(w, x)
        before.append(value)
    assert calls == [[id(v)] for v in before[:3]]


def test_programs_of_a_list_wait_for_those_of_their_devices(awaited: list[list[jax.Array]]) -> None:
    """What was given up cannot be waited for: then the launch that took it is."""
    launches, (first, second, third) = Launches(), (spread(1) for _ in range(3))
    devices = few_at_once(first.sharding.device_set)
    assert devices == set(jax.devices()) and few_at_once(jax.devices()[:1]) == frozenset()
    launches.follow(devices, [spread(64), first])
    launches.follow(devices, [second])
    second.delete()
    launches.follow(devices, [third])
    launches.follow(frozenset(), [third])
    assert [[id(a) for a in arrays] for arrays in awaited] == [[id(first)], [id(third)]]


#: More calls than XLA's client lets be under way, of work that takes longer than launching it.
UNAWAITED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, autopar
from autopar.search import Manual

def step(state, x):
    def loss(state):
        y = x
        for w in state:
            y = jax.lax.fori_loop(0, 4, lambda _, y: jnp.tanh(jnp.tanh(y @ w) @ w.T), y)
        return ((y - x) ** 2).mean()
    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads)], value

state, x = [jnp.ones((64, 64)) / 64] * 2, np.ones((2048, 64), np.float32)
run = autopar.parallelize(step, progress=False, num_stages=1, search=Manual(dp=4), donate_argnums=0)
values = []
for _ in range(200):
    state, value = run(state, x)
    values.append(value)
assert np.isfinite(np.asarray(values)).all()
"""


@pytest.mark.slow
def test_steps_that_nobody_waits_for_end() -> None:
    """Without a bound all threads of XLA's client wait for each other, most times."""
    command = [sys.executable, "-c", UNAWAITED]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "AUTOPAR_CACHE_DIR": "off"}
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_another_thread_waits(awaited: list[list[jax.Array]]) -> None:
    launches, program, array = Launches(), Program(), spread(1)
    launch(launches, program, [array])
    thread = threading.Thread(target=lambda: launch(launches, program, []))
    thread.start()
    thread.join()
    assert [[id(a) for a in arrays] for arrays in awaited] == [[], [id(array)]]


def test_what_was_given_up_is_not_waited_for(awaited: list[list[jax.Array]]) -> None:
    launches, array = Launches(), spread(1)
    launch(launches, Program(), [array])
    array.delete()
    launch(launches, Program(), [])
    assert awaited[1:] == [[]]


def test_a_program_that_is_gone_is_no_other_one(awaited: list[list[jax.Array]]) -> None:
    """Its `id` is that of the next object, most times; a test that counted on the contrary failed now and then."""
    launches = Launches()
    for _ in range(8):
        launch(launches, Program(), [])
    assert len(awaited) == 8
