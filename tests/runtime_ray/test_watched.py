"""What operators see of workers: metrics, records, heartbeats; and workers that are asked to end."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

import autopar
from autopar.errors import ClusterError
from autopar.runtime.checkpoints import Checkpoints
from autopar.runtime.ray import RunOptions
from autopar.runtime.ray.beacon import Beacon, Monitor
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.transport.channels import Credentials
from examples.mlp import build
from tests.runtime_ray.pipelines import FragileWorkerGroup, furthest, numbers, thread_cluster

pytest.importorskip("flatbuffers")

SIZES = {"layers": 4, "hidden": 16, "batch": 8}
CREDENTIALS = Credentials(b"0123456789abcdef")


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_a_process_without_heartbeats_is_silent_and_one_that_beats_is_not() -> None:
    with Monitor(CREDENTIALS) as monitor:
        beating = Beacon(monitor.address, CREDENTIALS, 0, heartbeat_s=0.01)
        stopped = Beacon(monitor.address, CREDENTIALS, 1, heartbeat_s=1000)
        beating.report(7, 3)
        wait_for(lambda: monitor.silent(0.5) == (1,))
        assert monitor.last(0) == (7, 3)  # heartbeats are no reports
        assert monitor.gone() == ()
        stopped.report_ending()
        wait_for(lambda: monitor.ending() == (1,))
        stopped.close()
        wait_for(lambda: monitor.gone() == (1,))
        assert monitor.silent(0.0) in ((), (0,))
        beating.close()


def samples_of(text: str) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples if not s.labels}


def test_steps_bytes_and_recoveries_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    fn, (state, batch) = build("tiny", **SIZES)
    caplog.set_level(logging.INFO, "autopar")
    with thread_cluster(2, 2, deadline_s=60, recover=True, copy_every=2) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, driver = state, cluster.workers
        for step in range(3):
            if step == 2:
                group = cluster.worker_groups[-1]
                assert isinstance(group, FragileWorkerGroup)
                group.lose(1)
                wait_for(lambda: driver.session.monitor.gone() == (1,))
                driver._watch.check(driver.session)  # what its thread does while nobody calls
                idle = samples_of(cluster.metrics)
            mine, _ = function(mine, batch)
        found = samples_of(cluster.metrics)
        driver._watch.check(driver.session)
        assert samples_of(cluster.metrics)["autopar_processes"] == 2
    assert idle["autopar_processes"] == 1
    assert found["autopar_step_seconds_count"] == 3
    assert found["autopar_step_seconds_sum"] > 0
    assert found["autopar_recoveries_total"] == 1
    assert found["autopar_queue_depth"] >= 0
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert found["autopar_copied_bytes_total"] >= size
    # Every step sends what the plan says that stages send each other. Counters are of processes: what the lost one sent
    # since it was last asked is not known.
    sent = sum(r.bytes * r.count for r in function.plan(state, batch).communication if r.kind == "send")
    assert found["autopar_sent_bytes_total"] >= sent > 0
    events = [(r.event, r.fields) for r in caplog.records if r.name == "autopar.ray"]  # type: ignore[attr-defined]
    assert [e for e, _ in events] == ["start", "worker gone", "loss", "recovery", "start"]
    assert events[1][1] == {"process": 1, "worker": 1}
    assert events[2][1]["worker"] == 1
    assert events[3][1]["recoveries"] == 1


@pytest.mark.slow
def test_workers_that_are_to_end_are_replaced_without_losing_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """With ``recover`` their arrays are copied while they live: nothing is run again."""
    fn, (state, batch) = build("tiny", **SIZES)
    caplog.set_level(logging.INFO, "autopar")
    with thread_cluster(2, 2, deadline_s=60, recover=True, copy_every=100) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, want = state, state
        for step in range(4):
            if step == 2:
                session = cluster.workers.session
                group = cluster.worker_groups[-1]
                assert isinstance(group, FragileWorkerGroup)
                group._hosts[0]._beacon.report_ending()
                wait_for(session.monitor.ending)
                assert cluster.workers.is_ending
            mine, _ = function(mine, batch)
            want, _ = jax.jit(fn)(want, batch)
        assert cluster.workers.recoveries == 0
        assert len(cluster.worker_groups) == 2
        assert furthest(jax.tree.leaves(mine), [numbers(x) for x in jax.tree.leaves(want)]) < 1e-5
    assert "drain" in [getattr(r, "event", "") for r in caplog.records]


def test_a_start_that_fails_after_workers_were_to_end_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are there: a machine that is slow for a while ends no training that is to recover."""
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 2, deadline_s=60, recover=True, copy_every=100) as cluster:
        function = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, _ = function(state, batch)
        driver, group = cluster.workers, cluster.worker_groups[-1]
        assert isinstance(group, FragileWorkerGroup)
        group._hosts[0]._beacon.report_ending()
        wait_for(driver.session.monitor.ending)
        launch, refused = driver._launch, list[int]()

        def refuses_once(*arguments: Any) -> Any:
            if not refused:
                refused.append(1)
                raise ClusterError("2 of 2 workers did not start: no answer")
            return launch(*arguments)

        monkeypatch.setattr(driver, "_launch", refuses_once)
        mine, _ = function(mine, batch)
        want = jax.jit(fn)(jax.jit(fn)(state, batch)[0], batch)[0]
        assert furthest(jax.tree.leaves(mine), [numbers(x) for x in jax.tree.leaves(want)]) < 1e-5
        assert (refused, driver.recoveries) == ([1], 1)


def test_a_training_asks_whether_it_or_a_worker_is_to_end(tmp_path: Path) -> None:
    fn, (state, batch) = build("tiny", **SIZES)
    checkpoints = Checkpoints(tmp_path)
    with thread_cluster(2, 2, deadline_s=60) as cluster, checkpoints.preemption(cluster=cluster) as told:
        state, _ = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)(state, batch)
        assert not told()
        group = cluster.worker_groups[-1]
        assert isinstance(group, FragileWorkerGroup)
        group._hosts[1]._beacon.report_ending()
        wait_for(told)
        checkpoints.save(1, state)
        assert checkpoints.steps == (1,)
    with thread_cluster(1, 1) as cluster, checkpoints.preemption(cluster=cluster) as told:
        assert not told()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told()


def test_collectives_between_machines_are_asked_for() -> None:
    """Where links are encrypted, a stage of several processes would send in the clear."""
    fn, (state, batch) = build("tiny", **SIZES)
    with thread_cluster(2, 1, deadline_s=60, encrypted=True) as threads:
        fields = {f.name: getattr(threads, f.name) for f in dataclasses.fields(threads)}
        function = autopar.parallelize(fn, cluster=RayCluster(**fields), num_microbatches=2, num_stages=1)
        with pytest.raises(ClusterError, match=r"stage of 2 processes(.|\n)*in the clear(.|\n)*hosts_per_stage=2"):
            function.compile(state, batch)


def test_arrays_are_not_pulled_between_machines_unless_that_is_asked_for() -> None:
    assert RunOptions(platform="cuda").direct
    assert not RunOptions(platform="cuda", encrypted=True).direct
    assert RunOptions(platform="cuda", encrypted=True, transport="direct").direct
