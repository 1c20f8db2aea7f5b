"""`autopar.measure`: steps that ran, next to their prediction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import AutoparError


def step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    momentum = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * momentum, "m": momentum}, loss


def arguments():
    return {"w": jnp.ones((64, 64)), "m": jnp.zeros((64, 64))}, {"x": jnp.ones((256, 64))}


@pytest.mark.parametrize("donate", [(), 0])
def test_time_and_memory_lie_beside_the_prediction(donate) -> None:
    state, batch = arguments()
    found = autopar.measure(autopar.parallelize(step, donate_argnums=donate), state, batch, repeats=3)
    assert not state["w"].is_deleted() and not batch["x"].is_deleted()
    assert len(found.seconds) == 3 and min(found.seconds) <= found.step_time <= max(found.seconds)
    rows = {r.name: r for r in found.rows}
    assert rows["step time"].predicted == found.plan.step_time
    for kind in ("parameters", "optimizer", "batch"):
        assert rows[kind].predicted == rows[kind].measured > 0
    assert rows["peak memory"].measured == sum(r.measured for r in found.memory[:-1])
    assert rows["peak memory"].ratio == rows["peak memory"].predicted / rows["peak memory"].measured


def test_it_prints_as_text_and_html() -> None:
    found = autopar.measure(step, *arguments(), repeats=1)
    assert "predicted/measured" in found.table() and "peak memory" in str(found)
    assert found._repr_html_().count("<tr>") == len(found.rows) + 1


def layers(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.sum(h**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def test_stages_and_workers_have_rows_of_their_own() -> None:
    args = [jnp.ones((32, 32)) * 0.01 for _ in range(4)], jnp.ones((64, 32))
    options = {"search": "data-parallel", "num_stages": 2, "num_microbatches": 2}
    found = autopar.measure(autopar.parallelize(layers, **options), *args, repeats=1)
    rows = {r.name: r for r in found.rows}
    for s, stage in enumerate(found.plan.stages):
        busy = rows[f"stage {s}, busy"]
        assert busy.unit == "seconds" and busy.predicted == stage.step_time
        assert busy.measured > 0
        assert rows[f"worker {s}, stage {s}"].predicted == stage.memory.total
    assert rows["peak memory"].measured >= 4 * 32 * 32 * 2
    assert "2 stages of" in str(found) and found._repr_html_().count("<tr>") == len(found.rows) + 1


def test_no_steps_are_a_mistake() -> None:
    with pytest.raises(AutoparError, match="repeats=0"):
        autopar.measure(step, *arguments(), repeats=0)
