"""`parallelize(eval_step, like=train_step)` where the train step is a pipeline: the state stays on its stages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoparError
from tests.api.steps import CLUSTER
from tests.api.test_eval import moved
from tests.api.test_inference import LAYERS, WIDTH, X, predict, predict_stacked, weights


def state_of(stacked: bool) -> Any:
    p = weights(stacked)
    return {"params": p, "mu": jax.tree.map(jnp.zeros_like, p)}


def loss_of(p: Any, x: Any) -> Any:
    run = predict if isinstance(p["w"], list) else predict_stacked
    return jnp.mean((run(p, x) - jnp.sin(x)) ** 2)


def train_step(state: Any, x: Any) -> Any:
    loss, g = jax.value_and_grad(loss_of)(state["params"], x)
    mu = jax.tree.map(lambda m, v: 0.9 * m + v, state["mu"], g)
    return {"params": jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mu), "mu": mu}, loss


def eval_step(state: Any, x: Any) -> Any:
    return loss_of(state["params"], x)


def predictions(state: Any, x: Any) -> Any:
    run = predict if isinstance(state["params"]["w"], list) else predict_stacked
    return run(state["params"], x)[:, :8]


@functools.cache
def planned(stacked: bool) -> autopar.Plan:
    """The plan of the train step, which two tests read."""
    options = {"num_stages": 2, "num_microbatches": 4}
    return autopar.parallelize(train_step, cluster=CLUSTER, **options).plan(state_of(stacked), X)


@pytest.mark.parametrize("stacked", [False, True], ids=["predictions of a list", "eval of a stack"])
def test_an_eval_step_runs_on_the_stages_of_the_train_step(monkeypatch: Any, stacked: bool) -> None:
    train = autopar.parallelize(train_step, cluster=CLUSTER, num_stages=2, num_microbatches=4)
    state, _ = train(state_of(stacked), X)
    plan = train.plans()[-1]
    host = jax.tree.map(np.asarray, state)
    fn, batch = (eval_step, X) if stacked else (predictions, X[:6])
    step = autopar.parallelize(fn, cluster=CLUSTER, like=train)
    np.testing.assert_allclose(step(state, batch), fn(host, batch), rtol=1e-5, atol=1e-6)
    other = step.plans()[-1]
    assert (other.num_stages, other.schedule) == (2, "inference")
    assert [s.devices for s in other.stages] == [s.devices for s in plan.stages]
    assert [s.mesh_shape for s in other.stages] == [s.mesh_shape for s in plan.stages]
    there = {r.path: (r.layout, r.stage) for r in plan.content.inputs}
    read = [r for r in other.content.inputs if "params" in r.path]
    assert read and all((r.layout, r.stage) == there[r.path] for r in read)
    seen = moved(monkeypatch)
    step(state, batch)
    # The layers of a stack are cut where they lie, on their own stage; no parameter comes from elsewhere.
    assert not set(seen) & {(WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH)}


def test_planned_like_a_pipeline_before_anything_runs() -> None:
    plan = planned(True)
    assert [s.layers for s in plan.stages] == [(0, 2, 4), (2, 4, 4)]
    assert autopar.Plan.from_json(plan.to_json()).stages == plan.stages
    other = autopar.parallelize(eval_step, cluster=CLUSTER, like=plan).plan(state_of(True), X)
    assert [s.layers for s in other.stages] == [(0, 2, 4), (2, 4, 4)]


def test_stages_that_cannot_be_shared() -> None:
    plan = planned(True)
    with pytest.raises(AutoparError, match=r"num_stages=4 was asked for"):
        autopar.parallelize(eval_step, cluster=CLUSTER, like=plan, num_stages=4).plan(state_of(True), X)
    with pytest.raises(AutoparError, match=r"loops over no layers"):
        autopar.parallelize(lambda state, x: jnp.sum(x @ state["params"]["w"][0]), cluster=CLUSTER, like=plan).plan(
            state_of(True), X
        )
    apart = planned(False)

    def first(state: Any, x: Any) -> Any:
        return jnp.mean(x @ state["params"]["w"][0])

    with pytest.raises(AutoparError, match=r"1 of the 2 stages"):
        autopar.parallelize(first, cluster=CLUSTER, like=apart).plan(state_of(False), X)
