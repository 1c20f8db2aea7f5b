"""Pipelines without a flush on workers, against one device that follows the version map."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import autopar
from autopar.schedule.without_flush.schedules import VersionMap
from tests.runtime.stale_models import MODELS, replay, step_of
from tests.runtime.test_stale import slow
from tests.runtime_ray.pipelines import thread_cluster

pytest.importorskip("flatbuffers")

SLOW = slow().groups[0]


def numbers(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), numbers(got), want)


@functools.cache
def plan_of(model, schedule, stages, m):
    """Planning is no subject here: each is planned once, on workers like those that it runs on."""
    params, loss, tx, make = MODELS[model]()
    options = {"schedule": schedule, "num_stages": stages, "num_microbatches": m}
    with thread_cluster(stages, 1, deadline_s=60, like=SLOW) as cluster:
        step = autopar.parallelize(step_of(loss, tx), cluster=cluster, **options)
        return step.plan({"params": params, "opt": tx.init(params)}, make(jax.random.key(100), 4 * m))


class Training:
    """A model trained on a cluster, and what one device gets by the version map."""

    def __init__(self, cluster, model, schedule, stages, m, calls=4):
        params, loss, tx, make = MODELS[model]()
        self.state = {"params": params, "opt": tx.init(params)}
        self.batches = [make(jax.random.key(100 + n), 4 * m) for n in range(calls)]
        self.step = autopar.parallelize(step_of(loss, tx), cluster=cluster, plan=plan_of(model, schedule, stages, m))
        lies = self.step.compile(self.state, self.batches[0]).plan.input_stages
        stage_of = jax.tree_util.tree_map_with_path(
            lambda path, _: lies["state['params']" + jax.tree_util.keystr(path)][0], params
        )
        self.versions = VersionMap(schedule, stages, m)
        self.want, losses = replay(loss, tx, self.state, self.batches, self.versions, m, stage_of)
        self.losses = np.array(losses).reshape(calls, m).mean(axis=1)


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(("model", "stages", "m"), [("perceptron", 2, 2)])
def test_calls_and_drains_are_the_replay_of_the_version_table(x64, schedule, model, stages, m):
    check(schedule, model, stages, m)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(("model", "stages", "m"), [("residual", 3, 4), ("attention", 2, 3), ("mlp", 4, 4)])
def test_models_and_stages_are_their_replay(x64, schedule, model, stages, m):
    check(schedule, model, stages, m)


def check(schedule, model, stages, m):
    with thread_cluster(stages, 1, deadline_s=60, like=SLOW) as cluster:
        training = Training(cluster, model, schedule, stages, m)
        state = training.state
        after_one = None
        for batch, loss in zip(training.batches, training.losses, strict=True):
            state, metrics = training.step(state, batch)
            np.testing.assert_allclose(np.asarray(metrics["loss"]), loss, rtol=1e-12)
            after_one = after_one or state
        assert_close(training.step.drain(state), training.want[-1])
        # A state stays as it is when it was used.
        assert_close(training.step.drain(after_one), training.want[m // training.versions.update_every])


def test_workers_that_are_lost_change_no_bit(x64):
    def last(strike):
        with thread_cluster(2, 1, recover=True, copy_every=2, deadline_s=60, like=SLOW) as cluster:
            training = Training(cluster, "perceptron", "pipedream", 2, 2, calls=5)
            state = training.state
            for n, batch in enumerate(training.batches):
                if n in strike:
                    cluster.worker_groups[-1].lose(n % 2)
                state, _ = training.step(state, batch)
            return numbers(training.step.drain(state)), len(cluster.worker_groups), training.want[-1]

    alone, groups, want = last(())
    struck, more, _ = last((1, 4))
    assert (groups, more) == (1, 3)
    jax.tree.map(np.testing.assert_array_equal, alone, struck)
    assert_close(struck, want)


def test_a_checkpoint_holds_what_is_under_way(x64, tmp_path):
    with thread_cluster(2, 1, deadline_s=60, like=SLOW) as cluster:
        training = Training(cluster, "perceptron", "pipedream", 2, 2)
        state = training.state
        for batch in training.batches[:2]:
            state, _ = training.step(state, batch)
        checkpoints = autopar.Checkpoints(tmp_path / "states")
        checkpoints.save(2, state)
        again = checkpoints.restore(state)
        for batch in training.batches[2:]:
            again, _ = training.step(again, batch)
        assert_close(training.step.drain(again), training.want[-1])
