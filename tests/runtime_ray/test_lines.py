"""Steps over connections of the driver's own, and reports by memory that processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.ray.beacon import Beacon, Monitor, made_board, opened_board
from autopar.runtime.ray.connections import MOST_BYTES, StepLines, packed, serve_steps, unpacked
from autopar.runtime.ray.program import _cut, _piece
from autopar.runtime.ray.tls import credentials_of, new_identity
from autopar.runtime.transport.channels import Credentials
from autopar.runtime.transport.tiles import HostKeys
from examples.mlp import build
from tests.runtime_ray.pipelines import FragileWorkerGroup, numbers, thread_cluster

pytest.importorskip("flatbuffers")

SECRET = b"0123456789abcdef"
PLAIN = Credentials(SECRET)


@pytest.fixture(params=["plain", "TLS"])
def credentials(request: pytest.FixtureRequest) -> Credentials:
    return PLAIN if request.param == "plain" else credentials_of(SECRET, new_identity())


@pytest.fixture
def lines(credentials: Credentials) -> Iterator[StepLines]:
    made = StepLines(credentials, "127.0.0.1")
    yield made
    made.close()


def connect(lines: StepLines, credentials: Credentials, processes: int, step: Any) -> None:
    for process in range(processes):
        serve_steps(lines.address, credentials, process, step)
    until = time.monotonic() + 30
    while not lines.takes([(b"", {})] * processes) and time.monotonic() < until:
        time.sleep(0.005)
    assert lines.takes([(b"", {})] * processes)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array(1.5),
        np.zeros((0, 4), np.float32),
        np.asarray(jnp.array([1, 2.5], jnp.bfloat16)),
        np.arange(6.0).reshape(2, 3).T,
        np.array([True, False]),
        HostKeys("threefry2x32", np.arange(4, dtype=np.uint32).reshape(2, 2)),
    ],
    ids=str,
)
def test_an_array_is_the_same_after_packing(array: Any) -> None:
    came = unpacked(packed(array))
    if isinstance(array, HostKeys):
        assert isinstance(came, HostKeys)
        assert came.generator == array.generator
        came, array = came.data, array.data
    assert came.dtype == array.dtype
    np.testing.assert_array_equal(came, array)


def test_steps_and_their_arrays_go_to_and_fro(lines: StepLines, credentials: Credentials) -> None:
    def step(message: bytes, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        if message == b"fail":
            raise ValueError("no such step")
        return message[::-1], {id: 2 * a for id, a in given.items()}

    connect(lines, credentials, 2, step)
    for size in (1, 100_000):
        tickets = [lines.call(p, "step", b"ab%d" % p, {7: np.full(size, p + 1.0)}) for p in range(2)]
        answers = lines.wait(tickets, 30)
        assert [answers[p].value[0] for p in range(2)] == [b"0ba", b"1ba"]
        for p in range(2):
            np.testing.assert_array_equal(answers[p].value[1][7], np.full(size, 2 * (p + 1.0)))
    failed = lines.wait([lines.call(1, "step", b"fail", {})], 30)[0]
    assert failed.error == "ValueError: no such step"
    assert not failed.lost
    assert lines.wait([lines.call(1, "step", b"xy", {})], 30)[0].value == (b"yx", {})
    assert not lines.takes([(b"", {0: np.zeros(MOST_BYTES + 1, np.uint8)}), (b"", {})])


def test_an_answer_that_comes_after_its_time_is_no_answer_to_the_next_call(
    lines: StepLines, credentials: Credentials
) -> None:
    go_on = threading.Event()

    def step(message: bytes, given: Mapping[int, Any]) -> tuple[bytes, dict[int, Any]]:
        if message == b"slow":
            assert go_on.wait(30)
        return message, {}

    connect(lines, credentials, 1, step)
    assert lines.wait([lines.call(0, "step", b"slow", {})], 0.01) == {}
    go_on.set()
    assert lines.wait([lines.call(0, "step", b"next", {})], 30)[0].value[0] == b"next"


@pytest.mark.slow
def test_a_process_that_ends_is_lost_at_once() -> None:
    code = (
        "import sys; from autopar.runtime.ray.connections import serve_steps\n"
        "from autopar.runtime.transport.channels import Credentials\n"
        "import time; serve_steps(('127.0.0.1', int(sys.argv[1])), Credentials(b'0123456789abcdef'), 0,"
        " lambda message, given: time.sleep(60))\n"
        "time.sleep(60)"
    )
    lines = StepLines(PLAIN, "127.0.0.1")
    worker = subprocess.Popen([sys.executable, "-c", code, str(lines.address[1])])
    try:
        until = time.monotonic() + 60
        while not lines.takes([(b"", {})]) and time.monotonic() < until:
            time.sleep(0.01)
        ticket = lines.call(0, "step", b"", {})
        assert lines.wait([ticket], 0.05) == {}
        worker.send_signal(signal.SIGKILL)
        answer = lines.wait([ticket], 30)[0]
        assert answer.lost
        assert answer.error == "its process ended"
    finally:
        worker.kill()
        worker.wait()
        lines.close()


def test_who_is_interrupted_in_the_middle_goes_on_by_calls_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = StepLines(PLAIN, "127.0.0.1")
    connect(lines, PLAIN, 1, lambda message, given: (message, {}))
    ticket = lines.call(0, "step", b"", {})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.runtime.ray.connections._receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lines.wait([ticket], 30)
    assert not lines.takes([(b"", {})])


class WithLines(FragileWorkerGroup):
    """Steps come over connections; counts those that came as calls."""

    steps = 0

    @property
    def has_lines(self) -> bool:
        return True

    def call(self, process: int, method: str, *args: Any) -> Any:
        type(self).steps += method == "step"
        return super().call(process, method, *args)


@pytest.mark.parametrize("lost_at", [None, 2])
def test_a_pipeline_is_the_same_over_lines(lost_at: int | None) -> None:
    """To the bit, also where a worker is lost and replaced."""
    fn, (state, batch) = build("tiny", layers=4, hidden=16, batch=8)
    batch = jax.tree.map(np.asarray, batch)
    trained = []
    for group in (FragileWorkerGroup, WithLines):
        with thread_cluster(2, 2, group=group, deadline_s=60, recover=True, copy_every=2) as cluster:
            function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2, num_stages=2)
            mine = state
            for step in range(4):
                if group is WithLines and step == lost_at:
                    workers = cluster.worker_groups[-1]
                    assert isinstance(workers, FragileWorkerGroup)
                    workers.lose(1)
                mine, metrics = function(mine, batch)
            trained.append([numbers(leaf) for leaf in jax.tree.leaves((mine, metrics))])
            if group is WithLines:
                lines = cluster.workers.session._lines
                assert lines is not None
                assert lines._number >= 2
                assert cluster.workers.recoveries == (lost_at is not None)
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_what_a_process_wrote_last_is_there_when_it_was_killed() -> None:
    board = made_board(2)
    assert board is not None
    code = (
        "import sys, time; from autopar.runtime.ray.beacon import opened_board\n"
        "board = opened_board(sys.argv[1]); board.write(1, 7, 3); print('done', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, board.name], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"done\n"
        worker.send_signal(signal.SIGKILL)
    assert board.read(1) == (7, 3)
    assert board.read(0) is None
    assert board.read(9) is None
    board.write(0, 0, -1)
    assert board.read(0) == (0, -1)
    board.write(0, 1 << 20, 5)
    assert board.read(0) == (1 << 20, 5)
    name = board.name
    board.close()
    assert opened_board(name) is None


@pytest.mark.parametrize("name", ["", "nowhere", "another machine /proc/1/fd/0"])
def test_a_board_of_another_machine_is_none(name: str) -> None:
    assert opened_board(name) is None


def test_only_the_owner_opens_a_board() -> None:
    board = made_board(1)
    assert board is not None
    if os.geteuid() != 0:
        pytest.skip("needs another user")
    command = ["cat", board.name.rpartition(" ")[2]]
    assert subprocess.run(command, check=True, capture_output=True).stdout == bytes(8)
    asked = subprocess.run(command, user=65534, capture_output=True, text=True)
    assert asked.returncode != 0
    assert "Permission denied" in asked.stderr
    board.close()


def test_reports_by_memory_and_by_connection_are_the_same() -> None:
    with Monitor(PLAIN, processes=2) as monitor:
        near = Beacon(monitor.address, PLAIN, 0, board=monitor.board)
        far = Beacon(monitor.address, PLAIN, 1)
        for beacon in (near, far):
            beacon.report(7, 3)
        until = time.monotonic() + 30
        while monitor.last(1) != (7, 3) and time.monotonic() < until:
            time.sleep(0.005)
        assert monitor.last(0) == monitor.last(1) == (7, 3)
        assert 0 not in monitor._last or monitor._last[0] == (-1, -1)  # nothing was sent
        near.close()
        far.close()


def test_a_result_in_parts_is_cut_by_its_first_dim() -> None:
    whole = np.arange(12).reshape(6, 2)
    parts = [_piece(1, k, 3, [None, whole]) for k in range(3)]
    assert [p.tolist() for p in parts] == [p.tolist() for p in np.split(whole, 3)]
    assert [p.tolist() for p in _cut(whole, 3)] == [p.tolist() for p in parts]
    assert _piece(1, 0, 1, [None, whole]) is whole
