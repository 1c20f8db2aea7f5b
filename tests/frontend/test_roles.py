"""What inputs are for, and which outputs replace them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from autopar.frontend import Traced
from tests.frontend.reference import traced

PARAMS = {"w": jnp.ones((4, 8)), "b": jnp.ones(8), "v": jnp.ones((8, 2)), "scale": jnp.ones(())}
BATCH = {"x": jnp.ones((6, 4)), "y": jnp.ones((6, 2))}

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "clip, schedule": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))),
    "clip afterwards": optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 2),
    "frozen part": optax.partition(
        {"train": optax.adam(1e-3), "keep": optax.set_to_zero()},
        {"w": "train", "b": "keep", "v": "train", "scale": "train"},
    ),
}


def loss_of(p: Any, batch: Any) -> jax.Array:
    return jnp.mean((jax.nn.relu(batch["x"] @ p["w"] + p["b"]) @ p["v"] * p["scale"] - batch["y"]) ** 2)


def roles(found: Traced) -> dict[str, str]:
    return {i.name: i.role for i in found.graph.inputs}


def updates(found: Traced) -> dict[str, str]:
    return {o.updates: o.path for o in found.graph.outputs if o.updates is not None}


def role_by_start(found: Traced, start: str) -> set[str]:
    return {role for name, role in roles(found).items() if name.startswith(start)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_state(name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        change, opt = optimizer.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], change), "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "norm": jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))}

    found = traced(step, {"params": PARAMS, "opt": optimizer.init(PARAMS), "step": 0}, BATCH)
    assert role_by_start(found, "state['params']") == {"parameter"}
    assert role_by_start(found, "state['opt']") <= {"optimizer"}
    assert role_by_start(found, "batch") == {"batch"}
    assert roles(found)["state['step']"] == "other"
    carried = [i.name for i in found.graph.inputs if i.name.startswith("state")]
    assert updates(found) == {name: name.replace("state", "[0]", 1) for name in carried}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_separate_arguments(name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        change, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, change), opt_state, loss + 0 * jax.random.uniform(key)

    found = traced(step, PARAMS, optimizer.init(PARAMS), BATCH, jax.random.key(0))
    assert role_by_start(found, "params") == {"parameter"}
    assert role_by_start(found, "opt_state") <= {"optimizer"}
    assert role_by_start(found, "batch") == {"batch"}
    assert roles(found)["key"] == "other"
    assert all(path.startswith("[0]" if name.startswith("params") else "[1]") for name, path in updates(found).items())
    assert len(updates(found)) == len(jax.tree.leaves((PARAMS, optimizer.init(PARAMS))))


def test_train_state_of_flax() -> None:
    state = TrainState.create(apply_fn=loss_of, params=PARAMS, tx=optax.adam(1e-3))

    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: state.apply_fn(p, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    found = traced(step, state, BATCH)
    assert role_by_start(found, "state.params") == {"parameter"}
    assert role_by_start(found, "state.opt_state") == {"optimizer"}
    assert roles(found)["state.step"] == "other"
    assert updates(found)["state.opt_state[0].mu['w']"] == "[0].opt_state[0].mu['w']"


def test_state_without_words_is_told_by_the_dataflow() -> None:
    def step(state: Any, batch: Any) -> Any:
        p, m = state
        loss, grads = jax.value_and_grad(loss_of)(p, batch)
        m = jax.tree.map(lambda a, g: 0.9 * a + g, m, grads)
        return (jax.tree.map(lambda a, b: a - 0.1 * b, p, m), m), loss

    found = traced(step, (PARAMS, PARAMS), BATCH)
    assert role_by_start(found, "state[0]") == {"parameter"}
    assert {roles(found)[f"state[1]['{k}']"] for k in ("w", "b", "v")} == {"optimizer"}


def test_averages_of_parameters_are_not_parameters() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["p"], batch)
        p = jax.tree.map(lambda a, g: a - 0.1 * g, state["p"], grads)
        return {"p": p, "average": jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["average"], p)}, loss

    found = traced(step, {"p": PARAMS, "average": PARAMS}, BATCH)
    assert role_by_start(found, "state['p']") == {"parameter"}
    assert {roles(found)[f"state['average']['{k}']"] for k in ("w", "b", "v")} == {"optimizer"}


def test_parameters_that_are_kept_as_they_are() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_of(p | {"w": state["kept"]}, batch))(state["p"])
        return {"p": jax.tree.map(lambda a, g: a - g, state["p"], grads), "kept": state["kept"]}, loss

    found = traced(step, {"p": PARAMS, "kept": PARAMS["w"]}, BATCH)
    assert roles(found)["state['kept']"] == "parameter"
    assert updates(found)["state['kept']"] == "[0]['kept']"


def test_no_metrics() -> None:
    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 0.1 * g, params, jax.grad(loss_of)(params, batch))

    found = traced(step, PARAMS, BATCH)
    assert {roles(found)[f"params['{k}']"] for k in ("w", "b", "v")} == {"parameter"}
    assert role_by_start(found, "batch") == {"batch"}
    assert len(updates(found)) == 4


def test_predictions_do_not_replace_labels() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        prediction = x @ params["w"] @ params["v"]
        return {"w": params["w"] - 1, "v": params["v"] * 2}, prediction

    found = traced(step, {k: PARAMS[k] for k in ("w", "v")}, BATCH["x"], BATCH["y"])
    assert updates(found) == {"params['w']": "[0]['w']", "params['v']": "[0]['v']"}
    assert (roles(found)["x"], roles(found)["y"]) == ("batch", "batch")


def test_batch_argnums_decide() -> None:
    def step(params: Any, x: Any, mask: Any) -> Any:
        return jax.tree.map(lambda a: a * 2, params), x @ params["w"] @ params["w"].T * mask

    free = traced(step, PARAMS, BATCH["x"], jnp.ones(4))
    told = traced(step, PARAMS, BATCH["x"], jnp.ones(4), batch_argnums=(1,))
    assert "x" in updates(free)  # it comes back with its type: the next call may take it
    assert "x" not in updates(told)
    assert (roles(told)["x"], roles(told)["mask"]) == ("batch", "other")
    assert role_by_start(told, "params") >= {"parameter"}


def test_keys_and_scalars_are_no_batch() -> None:
    found = traced(
        lambda k, r, s, n, x: x * s + n + jax.random.uniform(k) + jax.random.uniform(r),
        jax.random.key(0),
        jax.random.PRNGKey(0),
        0.1,
        3,
        jnp.ones((2, 5), jnp.bfloat16),
    )
    assert roles(found) == {"k": "other", "r": "other", "s": "other", "n": "other", "x": "batch"}


def test_arguments_of_named_tuples_and_swapped_results() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    found = traced(lambda p, n: (n + 1, Pair(p.left * 2, p.right + p.left)), Pair(jnp.ones(3), jnp.ones(3)), 0)
    assert updates(found) == {"p.left": "[1].left", "p.right": "[1].right", "n": "[0]"}


def test_results_of_another_type_replace_nothing() -> None:
    found = traced(lambda p: {"w": p["w"].astype(jnp.bfloat16)}, {"w": jnp.ones((2, 3))})
    assert updates(found) == {}
    assert roles(found) == {"p['w']": "batch"}


@pytest.mark.slow
def test_an_input_is_replaced_once() -> None:
    found = traced(lambda p: (p * 2, p * 3), jnp.ones(3))
    assert len(updates(found)) == 1
    assert [o.updates for o in found.graph.outputs].count("p") == 1
