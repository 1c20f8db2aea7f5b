"""Steps that are interrupted on the driver: all workers give them up, and the next step runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.ray.connections import StepLines
from autopar.runtime.ray.session import Session
from examples.mlp import build
from tests.runtime_ray.pipelines import FragileWorkerGroup, numbers, thread_cluster

#: Seconds of the deadline of a step: without an abort the next step ends after them, with lost workers.
DEADLINE_S = 6.0


class Interrupted(FragileWorkerGroup):
    """Steps are calls of the group. Calls whose count is in ``ends`` end with an exception before they are sent."""

    ends: ClassVar[dict[int, BaseException]]
    sent = 0

    def call(self, process: int, method: str, *args: Any) -> Any:
        if method == "step":
            cls = type(self)
            cls.sent += 1
            if error := cls.ends.pop(cls.sent, None):
                raise error
        return super().call(process, method, *args)


class InterruptedLines(Interrupted):
    """Steps go over lines."""

    @property
    def has_lines(self) -> bool:
        return True


@pytest.fixture(scope="module")
def mlp() -> tuple[Any, Any, Any, list[np.ndarray]]:
    fn, (state, batch) = build("tiny", layers=4, hidden=16, batch=8)
    want = jax.jit(fn)(state, batch)
    want = jax.jit(fn)(want[0], batch)
    return fn, state, jax.tree.map(np.asarray, batch), [numbers(x) for x in jax.tree.leaves(want)]


def close(got: Any, want: list[np.ndarray]) -> None:
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(numbers(a), b, rtol=1e-5, atol=1e-6)


def kept(cluster: Any) -> list[int]:
    """Number of arrays that each worker keeps."""
    return cluster.workers.session.call("forget", [((),)] * 2, 60)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of a handler")], ids=["ctrl-c", "other"])
@pytest.mark.few(1)
def test_an_exception_between_two_sends_aborts_the_step(mlp: Any, error: BaseException) -> None:
    fn, state, batch, want = mlp
    group = type("Group", (Interrupted,), {"ends": {4: error}})  # the second worker, in the second step
    with thread_cluster(2, 2, group=group, deadline_s=DEADLINE_S) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=2)
        first = step(state, batch)
        with pytest.raises(type(error)):
            step(first[0], batch)
        close(step(first[0], batch), want)
        # What workers made in a step that was given up is dropped.
        step(first[0], batch)
        before = kept(cluster)
        for _ in range(2):
            group.ends[group.sent + 2] = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                step(first[0], batch)
            close(step(first[0], batch), want)
        step(first[0], batch)
        assert kept(cluster) == before
        assert len(cluster.worker_groups) == 1


def test_an_abort_that_is_interrupted_is_sent_before_the_next_step(mlp: Any) -> None:
    """Whoever presses Ctrl-C twice loses no worker."""
    fn, state, batch, want = mlp

    class Twice(Interrupted):
        ends: ClassVar[dict[int, BaseException]] = {4: KeyboardInterrupt()}
        aborts = 0

        def call(self, process: int, method: str, *args: Any) -> Any:
            Twice.aborts += method == "abort"
            if method == "abort" and Twice.aborts == 1:
                raise KeyboardInterrupt
            return super().call(process, method, *args)

    with thread_cluster(2, 2, group=Twice, deadline_s=DEADLINE_S) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=2)
        first = step(state, batch)
        with pytest.raises(KeyboardInterrupt):
            step(first[0], batch)
        close(step(first[0], batch), want)
        assert Twice.aborts == 3
        assert len(cluster.worker_groups) == 1


def test_lines_are_opened_again_after_an_interrupt(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, state, batch, want = mlp
    group = type("Group", (InterruptedLines,), {"ends": {}})
    with thread_cluster(2, 2, group=group, deadline_s=DEADLINE_S) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=2)
        first = step(state, batch)
        session = cluster.workers.session
        wait_for_lines(session)

        def interrupted(*_: Any) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr("autopar.runtime.ray.connections._receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(first[0], batch)
        close(step(first[0], batch), want)
        wait_for_lines(session)
        called = group.sent
        close(step(first[0], batch), want)
        assert group.sent == called
        assert len(cluster.worker_groups) == 1


def wait_for_lines(session: Session) -> None:
    """Processes connect in threads of their own."""
    until = time.monotonic() + 30
    while not (session._lines and session._lines.takes([(b"", {})] * 2)) and time.monotonic() < until:
        time.sleep(0.005)
    assert session._lines is not None
    assert session._lines.takes([(b"", {})] * 2)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What runs in the background of a shell is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_between_the_sends_to_processes_of_ray(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal of the system, in the middle of the second send of a step that goes over connections."""
    fn, state, batch, want = mlp
    with autopar.Cluster.ray(workers=2, devices_per_worker=2, deadline_s=60) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=2)
        first = step(state, batch)
        processes = cluster.processes
        session = cluster.workers.session
        wait_for_lines(session)
        for _ in range(2):
            call = StepLines.call

            def interrupted(self: StepLines, process: int, method: str, *args: Any, call: Any = call) -> Any:
                if process == 1:
                    monkeypatch.undo()
                    signal.raise_signal(signal.SIGINT)
                return call(self, process, method, *args)

            monkeypatch.setattr(StepLines, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(first[0], batch)
            close(step(first[0], batch), want)
            wait_for_lines(session)
        assert cluster.processes == processes
