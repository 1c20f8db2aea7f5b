"""Functions without a backward pass: what is the batch, and pipelines of forwards alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER

LAYERS, WIDTH = 4, 64


def weights(stacked: bool) -> Any:
    each = [np.random.default_rng(i).standard_normal((WIDTH, WIDTH), np.float32) / 8 for i in range(LAYERS)]
    return {"w": jnp.stack(each) if stacked else [jnp.asarray(w) for w in each]}


def predict(params: Any, x: Any) -> Any:
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return x


def predict_stacked(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((predict(params, x) - x) ** 2)


X = np.random.default_rng(9).standard_normal((16, WIDTH)).astype(np.float32)
STEPS = {"list": (predict, False), "stack": (predict_stacked, True), "loss": (loss, False)}


SAID = {"batch_argnums": 1}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [("list", 2, {}), ("list", 4, SAID), ("stack", 4, {}), ("stack", 2, SAID), ("loss", 2, {}), ("loss", 2, SAID)],
)
def test_a_pipeline_of_forwards_alone(name: str, stages: int, options: dict[str, Any]) -> None:
    fn, stacked = STEPS[name]
    step = autopar.parallelize(
        fn, cluster=CLUSTER, schedule="inference", num_stages=stages, num_microbatches=4, **options
    )
    params = weights(stacked)
    np.testing.assert_allclose(step(params, X), fn(params, X), rtol=1e-5, atol=1e-6)
    plan = step.plans()[-1]
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (stages, 4, "inference")
    products = [sum("dot_general" in n or "scan" in n for n in s.operators) for s in plan.stages]
    assert min(products) > 0
    timeline = autopar.simulate(plan)
    assert timeline.step_time == pytest.approx(plan.step_time)


def test_a_free_schedule_of_forwards_alone_is_called_so() -> None:
    plan = autopar.parallelize(predict, cluster=CLUSTER, num_stages=2, num_microbatches=4).plan(weights(False), X)
    assert plan.schedule == "inference"
    assert "(inference, 4 microbatches)" in str(plan)


def test_what_is_not_called_as_models_are() -> None:
    """A stack that a loop takes layer by layer, and matrices whose rows are summed over, are no examples."""

    def stacked(s: Any, b: Any) -> Any:
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], s["w"])[0]
        return jnp.mean((h - b["x"]) ** 2)

    def square(s: Any, b: Any) -> Any:
        return jnp.mean((jnp.tanh(b["x"] @ s["up"]) @ s["down"]) ** 2)

    def roles(fn: Any, *args: Any) -> dict[str, str]:
        return {r.path: r.role for r in autopar.parallelize(fn, cluster=CLUSTER).plan(*args).content.inputs}

    assert roles(stacked, weights(True), {"x": X}) == {"s['w']": "parameter", "b['x']": "batch"}
    matrices = {"up": jnp.ones((WIDTH, WIDTH)), "down": jnp.ones((WIDTH, WIDTH))}
    found = roles(square, matrices, {"x": X})
    assert found == {"s['up']": "parameter", "s['down']": "parameter", "b['x']": "batch"}
    # Of two matrices that a product sums over nobody can say which holds examples.
    assert set(roles(lambda a, b: jnp.sum(a.T @ b), X, X).values()) == {"batch"}


@pytest.mark.slow
def test_a_cache_that_comes_back_is_no_prediction() -> None:
    def generate(params: Any, cache: Any, token: Any) -> Any:
        h = params["embed"][token]
        return cache + h, jnp.argmax(h @ params["embed"].T, -1)

    step = autopar.parallelize(generate, cluster=CLUSTER)
    plan = step.plan({"embed": jnp.ones((32, 16))}, jnp.ones((8, 16)), jnp.arange(8))
    roles = {r.path: r.role for r in plan.content.inputs}
    assert roles["cache"] not in ("batch", "other")  # it lies where the next call wants it
