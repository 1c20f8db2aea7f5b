"""Workers on Ray that form one world of `jax.distributed` and send by programs of both."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import autopar
from autopar.errors import ScheduleError, WorkerLostError
from autopar.runtime.ray.connections import StepLines
from autopar.runtime.ray.exchanges import planned_exchanges
from autopar.runtime.ray.messages import PlannedExchange
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.schedule import Recv, Send
from autopar.schedule.instructions import Instruction
from examples import gpt, mlp
from tests.runtime_ray.pipelines import example, numbers, thread_cluster
from tests.runtime_ray.test_interrupts import wait_for_lines


def tags(instructions: tuple[Instruction, ...]) -> list[int]:
    return [i.tag for i in instructions if isinstance(i, Send | Recv)]


@pytest.mark.parametrize(("table", "hosts"), [("1f1b", (1, 1)), ("gpipe", (2, 1))])
def test_both_workers_of_an_exchange_plan_the_same_program(table: str, hosts: tuple[int, ...]) -> None:
    source = example("mlp", 2, layers=2, hidden=16, batch=8, table=table).source
    planned = planned_exchanges(source, ProcessGroups(hosts))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(planned[0]), type=tuple[PlannedExchange, ...]) == planned[0]
    for worker, exchanges in zip(source.program.workers, planned, strict=True):
        assert list(itertools.chain(*(e.tags for e in exchanges))) == tags(worker.instructions)
    assert sorted(planned[0], key=lambda e: e.tags) == sorted(planned[1], key=lambda e: e.tags)
    assert {(e.source, e.target) for e in planned[0]} == {(0, 1), (1, 0)}


def test_lists_whose_sends_cross_are_refused() -> None:
    source = example("mlp", 2, layers=2, hidden=16, batch=8).source
    first, second = source.program.workers
    line = list(first.instructions)
    send, receive = (next(n for n, i in enumerate(line) if isinstance(i, kind)) for kind in (Send, Recv))
    line[send], line[receive] = line[receive], line[send]
    crossed = msgspec.structs.replace(first, instructions=tuple(line))
    broken = msgspec.structs.replace(source.program, workers=(crossed, second))
    object.__setattr__(source, "program", broken)
    with pytest.raises(ScheduleError, match="wait for each other"):
        planned_exchanges(source, ProcessGroups((1, 1)))


def test_ampnet_is_refused_before_workers_start() -> None:
    fn, (state, batch) = mlp.build("tiny", layers=2, hidden=16, batch=8)
    with thread_cluster(2, 1, transport="world") as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=4, num_stages=2, schedule="ampnet")
        with pytest.raises(ScheduleError, match="AMPNet has no order"):
            step.compile(state, batch)
        assert not cluster.worker_groups


def trained(transport: str, *, workers: int = 2, hosts: int = 1, kill: int | None = None, **asked: Any) -> list[Any]:
    """State and metrics of four steps; ``kill`` names the process that is killed before the third."""
    flushed = asked.get("schedule") not in ("2bw", "pipedream")  # without a flush no update reads other stages
    apart: dict[str, Any] = {} if flushed else {"tied": False, "clip": None}
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 8, "batch": 8, "dtype": "float64"}
    fn, (state, batch) = gpt.build("tiny", **sizes, **apart)
    options = {"workers": workers, "devices_per_worker": 2, "hosts_per_stage": hosts, "transport": transport}
    with autopar.Cluster.ray(**options, deadline_s=60, recover=kill is not None, copy_every=3) as cluster:  # type: ignore[arg-type]
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=4, **asked)
        for number in range(4):
            if number == 2 and kill is not None:
                os.kill(cluster.processes[kill], signal.SIGKILL)  # type: ignore[attr-defined]
            state, metrics = step(state, batch)
        if not flushed:
            state = step.drain(state)
        if kill is not None:
            assert cluster.workers.recoveries == 1  # type: ignore[attr-defined]
        assert sum(cluster.workers.session.groups.sizes) == workers  # type: ignore[attr-defined]
        return [numbers(x) for x in jax.tree.leaves((state, metrics))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("schedule", "workers", "hosts"),
    [("1f1b", 2, 1), ("gpipe", 4, 2), ("zb-h1", 4, 1), ("interleaved", 2, 1), ("2bw", 2, 1), ("pipedream", 2, 1)],
)
def test_training_in_a_world_is_that_over_sockets_to_the_bit(schedule: str, workers: int, hosts: int) -> None:
    with jax.enable_x64(True):
        world, sockets = (trained(t, workers=workers, hosts=hosts, schedule=schedule) for t in ("world", "sockets"))
    for a, b in zip(world, sockets, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kill", [0, 1])
def test_a_lost_member_makes_the_world_anew_and_the_step_is_run_again(kill: int) -> None:
    """The death of process 0 ends the coordination service, and with it the other process."""
    with jax.enable_x64(True):
        lost, whole = trained("world", kill=kill), trained("world")
    for a, b in zip(lost, whole, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_member_is_named_where_others_wait_in_a_send() -> None:
    fn, (state, batch) = mlp.build("tiny", layers=4, hidden=16, batch=8)
    with autopar.Cluster.ray(workers=2, devices_per_worker=1, transport="world", deadline_s=8) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        state, _ = step(state, batch)
        os.kill(cluster.processes[1], signal.SIGSTOP)  # type: ignore[attr-defined]
        with pytest.raises(WorkerLostError, match="worker 1"):
            step(state, batch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recover", [True, False])
def test_an_interrupt_leaves_a_step_that_ends_or_a_world_that_is_made_anew(
    recover: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, (state, batch) = mlp.build("tiny", layers=4, hidden=16, batch=8)
    first = jax.jit(fn)(state, batch)[0]
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(first, batch)[0])]
    with autopar.Cluster.ray(
        workers=2, devices_per_worker=1, transport="world", deadline_s=60, recover=recover
    ) as cluster:
        step = autopar.parallelize(fn, cluster=cluster, num_microbatches=2)
        mine, _ = step(state, batch)
        processes = cluster.processes  # type: ignore[attr-defined]

        wait_for_lines(cluster.workers.session)  # type: ignore[attr-defined]

        def interrupted(*_: Any) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        # All processes were told of the step: it ends, and its results are dropped.
        monkeypatch.setattr("autopar.runtime.ray.connections._receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(mine, batch)
        for a, b in zip(jax.tree.leaves(step(mine, batch)[0]), want, strict=True):
            np.testing.assert_allclose(numbers(a), b, rtol=1e-5, atol=1e-6)
        assert cluster.processes == processes  # type: ignore[attr-defined]
        wait_for_lines(cluster.workers.session)  # type: ignore[attr-defined]

        call = StepLines.call

        def half(self: StepLines, process: int, method: str, *args: Any) -> Any:
            if process == 1:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return call(self, process, method, *args)

        monkeypatch.setattr(StepLines, "call", half)
        with pytest.raises(KeyboardInterrupt):
            step(mine, batch)
        if not recover:
            with pytest.raises(WorkerLostError, match="others that did not begin it"):
                step(mine, batch)
            return
        for a, b in zip(jax.tree.leaves(step(mine, batch)[0]), want, strict=True):
            np.testing.assert_allclose(numbers(a), b, rtol=1e-5, atol=1e-6)
        assert cluster.processes != processes  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_links_of_a_world_are_measured() -> None:
    from autopar.runtime.measuring import QUICK

    with autopar.Cluster.ray(workers=2, devices_per_worker=2, transport="world", deadline_s=60) as cluster:
        text = autopar.calibrate("mine", cluster=cluster, effort=QUICK).text
    assert "by programs of both" in text
