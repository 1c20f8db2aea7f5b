from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from autopar.transforms import delayed
from autopar.transforms.asynchronous import WorkerEvent
from benchmarks.stale import bench
from benchmarks.stale.delays import TECHNIQUES, followed
from benchmarks.stale.learning import begun, learner
from benchmarks.stale.tasks import quadratic, tasks


@pytest.mark.slow
def test_stale_techniques_are_compared() -> None:
    report = bench.run(True, print)
    assert report.passed
    rows = {row["technique"]: row for row in report.rows}
    assert set(rows) == {*TECHNIQUES, "local SGD", "DiLoCo"}
    assert len({rows[name]["delay 0"] for name in TECHNIQUES}) == 1, "without delay all are the same run"
    assert rows["delayed"]["delay 8"] > rows["delayed"]["delay 7"] > rows["pipedream"]["delay 7"]


@pytest.mark.parametrize("delay", [0, 3])
def test_a_constant_age_is_the_transform(delay: int) -> None:
    task = quadratic()
    ages = np.minimum(np.arange(24), delay)[None, None, :, None] * np.ones((1, 1, 24, 4), int)
    ((got,),) = learner(task, 8, 24, 8)(ages, begun(task, [5], 24))

    def plain(state, batch):
        value, grads = jax.value_and_grad(task.loss)(state["params"], batch)
        updates, opt = task.optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    step = delayed(plain, delay=delay)
    first, data = jax.random.split(jax.random.key(5))
    params = task.init(first)
    state, want = step.init({"params": params, "opt": task.optimizer.init(params)}), []
    run = jax.jit(step)
    for t in range(24):
        state, _ = run(state, task.batch(jax.random.fold_in(data, t)))
        if t % 8 == 7:
            want.append(task.loss(state.state["params"], task.held_out))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_ages_and_ends_follow_from_the_order() -> None:
    order = ["r0", "r1", "u0", "r0", "u0", "r0", "u1", "r1", "u0"]
    events = tuple(WorkerEvent(int(e[1]), "read" if e[0] == "r" else "update") for e in order)
    ages, ends_s = followed(events, [[1.0, 1.0, 2.0], [2.5, 9.0]])
    assert ages == [0, 0, 2, 1]
    assert ends_s == [1.0, 2.0, 2.5, 4.0]


@pytest.mark.parametrize("name", sorted(TECHNIQUES))
def test_versions_that_are_read_are_there(name: str) -> None:
    for delay in (0, 1, 4, 8):
        course = TECHNIQUES[name](delay, 40, 4, 7)
        assert course.ages.shape == (40, 4) and course.ends_s.shape == (40,)
        assert (course.ages >= 0).all() and (course.ages <= np.arange(40)[:, None]).all()
        assert (np.diff(course.ends_s) >= 0).all() and course.ends_s[0] > 0
        assert delay or not course.ages.any()


@pytest.mark.slow
def test_the_longer_tasks_learn() -> None:
    for task in tasks(quick=False)[1:]:
        params, batches = begun(task, [1], 32)
        ((first, last),) = learner(task, 1, 32, 16)(np.zeros((1, 1, 32, len(params)), int), (params, batches))[:, 0]
        start = float(task.loss(jax.tree.map(lambda x: x[0], params), task.held_out))
        assert last < first < start
