"""AMPNet on workers: what arrived, replayed on workers, by threads, and by an interpreter of stages."""

from __future__ import annotations

import os
import random
import signal

import jax
import numpy as np
import pytest

import autopar
from autopar.cluster.catalog import folder
from autopar.errors import ScheduleError
from autopar.runtime import ampnet
from autopar.schedule import Table, get, parse_table, to_text
from autopar.schedule.without_flush.ampnet import AmpNet
from tests.runtime.stale_models import MODELS, step_of
from tests.runtime.test_ampnet import decorated, interpreted
from tests.runtime.test_stale import slow
from tests.runtime_ray.pipelines import thread_cluster

pytest.importorskip("flatbuffers")

SLOW = slow().groups[0]


def numbers(tree):
    return jax.tree.map(np.asarray, tree)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, numbers(got), numbers(want))


def on(cluster, model, stages, m, **numbers_of_schedule):
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    schedule = AmpNet(**numbers_of_schedule)
    step = autopar.parallelize(
        step_of(loss, tx), schedule=schedule, num_stages=stages, num_microbatches=m, cluster=cluster
    )
    return step, state, [make(jax.random.key(n), 4 * m) for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "m", "active", "every"), [(2, 6, 4, 2), (3, 4, None, 1)])
def test_the_order_on_workers_is_replayed_there_and_interpreted(x64, stages, m, active, every):
    with thread_cluster(stages, 1, deadline_s=60, like=SLOW) as cluster:
        step, state, batches = on(cluster, "perceptron", stages, m, max_active_keys=active, min_update_frequency=every)
        for batch in batches[:3]:
            new, metrics = step(state, batch)
            order = parse_table(to_text(step.order))
            again, other = step.replay(order, state, batch)
            assert_equal((new, metrics), (again, other))
            lies = step.compile(state, batch).plan.input_stages
            places = {n: lies[f"state['params']['{n}']"][0] for n in state["params"]}
            before = numbers(state)
            want = interpreted(before["params"], before["opt"][0].trace, batch, order, places, every)
            for n, w in want.items():
                np.testing.assert_allclose(np.asarray(new["params"][n]), w, rtol=1e-12, atol=1e-12)
            state = new


def test_one_process_replays_what_workers_did(x64):
    with thread_cluster(2, 1, deadline_s=60, like=SLOW) as cluster:
        step, state, batches = on(cluster, "residual", 2, 4, max_active_keys=3)
        new, metrics = step(state, batches[0])
        order, new, metrics = step.order, numbers(new), numbers(metrics)
    here, state, _ = decorated("residual", AmpNet(max_active_keys=3), 2, 4)
    again, other = here.replay(order, state, batches[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), (new, metrics), numbers((again, other))
    )


def drawn_choice(seed):
    """A choice of passes that is drawn among all that could run, so that no two calls have one order."""
    draw = random.Random(seed)

    def choice(stage):
        kinds = ["backward"] if stage.has("backward") else []
        kinds += ["forward"] if stage.may_begin and stage.has("forward") else []
        return draw.choice(kinds) if kinds else None

    return choice


def test_workers_that_are_lost_repeat_the_orders_that_were(x64, monkeypatch):
    monkeypatch.setattr(ampnet, "choice", drawn_choice(5))
    with thread_cluster(2, 1, recover=True, copy_every=3, deadline_s=60, like=SLOW) as cluster:
        step, state, batches = on(cluster, "residual", 2, 4, max_active_keys=4)
        orders, losses, first = [], [], state
        for n, batch in enumerate(batches):
            if n in (1, 2, 3):
                cluster.worker_groups[-1].lose(n % 2)
            state, metrics = step(state, batch)
            orders.append(step.order)
            losses.append(np.asarray(metrics["loss"]))
        assert len(cluster.worker_groups) == 4
        other = first
        for batch, order, loss in zip(batches, orders, losses, strict=True):
            other, metrics = step.replay(order, other, batch)
            np.testing.assert_array_equal(np.asarray(metrics["loss"]), loss)
        assert_equal(state, other)


def slow_file(path):
    """A cluster file whose arithmetic is so slow that small models are worth stages."""
    text = (folder() / "local-cpu.toml").read_text().replace("f32 = 12.9e9, f64 = 5.6e9", "f32 = 1e8, f64 = 1e7")
    file = path / "slow.toml"
    file.write_text(text.replace("bandwidth = 1.2e9", "bandwidth = 1e11").replace("latency_s = ", "latency_s = 0 # "))
    return file


# Ray forks to start its daemons; where a test before this one has started jax, jax warns of that.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["perceptron", "residual"])
def test_processes_on_ray_are_replayed(x64, model, tmp_path):
    file = slow_file(tmp_path)
    with autopar.Cluster.ray(workers=3, devices_per_worker=1, like=str(file), recover=True) as cluster:
        step, state, batches = on(cluster, model, 3, 8, max_active_keys=5, min_update_frequency=2)
        for n, batch in enumerate(batches):
            new, metrics = step(state, batch)
            order = step.order
            if n == 2:
                os.kill(cluster.processes[1], signal.SIGKILL)
            assert_equal((new, metrics), step.replay(order, state, batch))
            state = new


@pytest.mark.slow
def test_an_order_of_other_numbers_is_refused(x64):
    with thread_cluster(2, 1, deadline_s=60, like=SLOW) as cluster:
        step, state, batches = on(cluster, "perceptron", 2, 2)
        step(state, batches[0])
        order = step.order
        with pytest.raises(ScheduleError, match="the step has 2 and 2"):
            step.replay(get("ampnet").table(2, 4), state, batches[0])
        impossible = Table(order.name, 2, 2, tuple(tuple(reversed(row)) for row in order.rows))
        with pytest.raises(ScheduleError, match="have to wait for ever"):
            step.replay(impossible, state, batches[0])


def test_stages_of_several_processes_are_refused(x64, monkeypatch):
    with thread_cluster(2, 1, deadline_s=60, like=SLOW) as cluster:
        step, state, batches = on(cluster, "perceptron", 2, 2)
        monkeypatch.setattr(type(cluster), "hosts", lambda self, devices: 2)
        with pytest.raises(ScheduleError, match="2 processes"):
            step(state, batches[0])
