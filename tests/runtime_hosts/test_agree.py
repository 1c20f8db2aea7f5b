"""Values that all processes of a world give each other, here threads over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar._compat.world import World
from autopar.errors import CallbackError, ProcessLostError
from autopar.lower.callbacks import Callbacks
from autopar.runtime.hosts import agree, callbacks
from autopar.runtime.hosts.agree import Agreement


class Store:
    """jax's client of the coordination service, as far as `World` uses it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, *, allow_overwrite: bool) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, limit_ms: int) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, limit_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return bytes(self.values[key])

    def key_value_increment(self, key: str, count: int) -> int:
        with self.changed:
            self.values[key] = self.values.get(key, 0) + count
            return int(self.values[key])

    def key_value_delete(self, prefix: str) -> None:
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}


class Watch:
    """A watch that never sees a process lost."""

    def raise_if_lost(self) -> None:
        return


def in_threads(processes: int, present: Sequence[int], call: Callable[[World], Any]) -> list[Any]:
    store = Store()
    with ThreadPoolExecutor(len(present)) as pool:
        calls = [pool.submit(call, World(p, processes, store)) for p in present]
        return [c.exception() or c.result() for c in calls]


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "watch", lambda world: Watch())


def test_all_processes_get_the_values_of_all_in_each_turn() -> None:
    def turns(world: World) -> list[list[bytes]]:
        return [Agreement.next(world, "a test").gather(b"%d of %d" % (n, world.process)) for n in range(5)]

    expected = [[b"%d of %d" % (n, p) for p in range(3)] for n in range(5)]
    assert in_threads(3, range(3), turns) == [expected] * 3


def test_all_processes_hear_which_one_did_not_give_its_value() -> None:
    def turn(world: World) -> list[bytes]:
        if world.process == 0:  # it looks for values that came in time when it has waited for the one that did not
            world.get("autopar/turn/1/given/1", 60.0)
            world.get("autopar/turn/1/given/3", 60.0)
        return Agreement.next(world, "a test", 0.2).gather(b"")

    errors = in_threads(4, (0, 1, 3), turn)
    assert [type(e) for e in errors] == [ProcessLostError] * 3
    assert [e.processes for e in errors] == [(2,)] * 3


def test_exceptions_of_callbacks_are_raised_in_all_processes_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(callbacks, "world", lambda: here.world)
    several = {1: ValueError("mine"), 3: KeyError("other")}

    def steps(world: World) -> list[Any]:
        here.world = world
        kept, errors = Callbacks(guards=True), list[Any]()
        for raised in ({}, several, {}):
            kept.raised += [raised[world.process]] if world.process in raised else []
            try:
                errors.append(callbacks.check_callbacks(kept, jnp.ones(2)))
            except jax.errors.JaxRuntimeError as error:
                errors.append(error)
        return errors

    for process, (before, error, after) in enumerate(in_threads(4, range(4), steps)):
        assert before is None and after is None
        if process in several:
            assert error.__cause__ is several[process] and not isinstance(error, CallbackError)
        else:
            assert isinstance(error, CallbackError) and error.process == 1
            assert "raised ValueError: mine in process 1, KeyError: 'other' in process 3\n" in str(error)
