"""Other functions on the state of a train step: nothing that they do not read is moved, and what they read stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoparError
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same

WIDE = 512


def new_state():
    p = {"up": jnp.full((16, WIDE), 0.01), "down": jnp.full((WIDE, 16), 0.02), "bias": jnp.zeros(16)}
    return {"params": p, "mu": jax.tree.map(jnp.zeros_like, p), "count": jnp.int32(0)}


def batch(size=8):
    return {"x": np.linspace(-1, 1, size * 16, dtype=np.float32).reshape(size, 16)}


def loss_of(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["up"]) @ p["down"] + p["bias"] - b["x"]) ** 2)


def train_step(state, b):
    loss, g = jax.value_and_grad(loss_of)(state["params"], b)
    mu = jax.tree.map(lambda m, v: 0.9 * m + v, state["mu"], g)
    p = jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mu)
    return {"params": p, "mu": mu, "count": state["count"] + 1}, loss


def eval_step(state, b):
    return loss_of(state["params"], b)


def roles(fn, *args, **options):
    plan = autopar.parallelize(fn, cluster=CLUSTER, **options).plan(*args)
    return {r.path: r.role for r in plan.content.inputs}


def test_a_leaf_is_a_batch_only_by_evidence():
    found = roles(eval_step, new_state(), batch())
    assert {found[f"state['params']['{n}']"] for n in ("up", "down", "bias")} == {"parameter"}
    assert found["b['x']"] == "batch"
    assert {role for path, role in found.items() if "mu" in path} == {"other"}
    assert roles(lambda a, b: a @ b["x"].T, jnp.ones((4, 16)), batch())["b['x']"] == "batch"
    assert roles(lambda q, b: loss_of(q, b), new_state()["params"], batch())["q['up']"] == "parameter"
    assert roles(eval_step, new_state(), batch(), batch_argnums=0)["state['params']['up']"] == "batch"
    assert roles(train_step, new_state(), batch())["b['x']"] == "batch"


def moved(monkeypatch):
    """Names of the arrays that are moved from now on."""
    seen = []
    original = jax.device_put

    def put(x, *args, **kwargs):
        seen.append(getattr(x, "shape", None))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", put)
    return seen


@pytest.mark.few(3)
@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("options", [{}, {"mesh_shape": (2, 4)}])
def test_an_eval_step_moves_nothing_of_the_state(monkeypatch, like, options):
    train = autopar.parallelize(train_step, cluster=CLUSTER, search="zero3", **options)
    state, _ = train(new_state(), batch())
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    evaluate = autopar.parallelize(eval_step, cluster=CLUSTER, **({"like": train} if like else {}))
    want = eval_step(jax.tree.map(np.asarray, state), batch())
    evaluate(state, batch())
    seen = moved(monkeypatch)
    for _ in range(2):
        np.testing.assert_allclose(evaluate(state, batch()), want, rtol=1e-5)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert not shapes & set(seen)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_pipeline_leaves_what_nothing_reads(monkeypatch, stacked):
    """Moments of an eval step in stages, of a model whose layers are a stack or not."""

    def loss(p, b):
        if stacked:
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], p["w"])[0]
        else:
            h = jnp.tanh(jnp.tanh(b["x"] @ p["w"][0]) @ p["w"][1])
        return jnp.mean((h - b["x"]) ** 2)

    w = np.random.default_rng(0).standard_normal((4, 16, 16), np.float32)
    p = {"w": jnp.asarray(w) if stacked else [jnp.asarray(w[0]), jnp.asarray(w[1])]}
    state = {"params": p, "mu": {"w": jnp.ones((4, 16, 15))}, "nu": np.ones((4, 16, 15), np.float32)}

    def evaluate_step(state, b):
        return loss(state["params"], b)

    evaluate = autopar.parallelize(evaluate_step, cluster=CLUSTER, num_stages=2, num_microbatches=2)
    assert evaluate.plan(state, batch()).num_stages == 2
    np.testing.assert_allclose(evaluate(state, batch()), loss(p, batch()), rtol=1e-5)
    seen = moved(monkeypatch)
    evaluate(state, batch())
    assert seen and (4, 16, 15) not in seen


def test_planned_like_the_train_step_before_anything_runs():
    train = autopar.parallelize(train_step, cluster=CLUSTER, search="zero3")
    plan = train.plan(new_state(), batch())
    other = autopar.parallelize(eval_step, cluster=CLUSTER, like=train).plan(new_state(), batch())
    layouts = {r.path: r.layout for r in plan.content.inputs}
    for r in other.content.inputs:
        if "params" in r.path:
            assert r.layout == layouts[r.path]
    assert other.stages[0].mesh_shape == plan.stages[0].mesh_shape
    other_state = autopar.parallelize(lambda s, b: jnp.sum(b["x"] @ s["w"]), cluster=CLUSTER, like=plan)
    with pytest.raises(AutoparError, match=r"has a path and a type of its arguments"):
        other_state.plan({"w": jnp.ones((16, 3)), "v": jnp.ones(2)}, batch())


def test_what_like_cannot_be():
    train = autopar.parallelize(train_step, cluster=CLUSTER)
    with pytest.raises(AutoparError, match=r"like=train_step: it has no plan yet"):
        autopar.parallelize(eval_step, cluster=CLUSTER, like=train).plan(new_state(), batch())
    with pytest.raises(AutoparError, match=r"like=3 is neither"):
        autopar.parallelize(eval_step, cluster=CLUSTER, like=3).plan(new_state(), batch())


@pytest.mark.slow
def test_generation_keeps_its_cache(monkeypatch):
    def generate(params, cache, token):
        h = params["embed"][token]
        cache = jax.lax.dynamic_update_slice(cache, h[:, None], (0, 1, 0))
        scores = jax.nn.softmax(jnp.einsum("bh,bsh->bs", h, cache))
        return cache, jnp.argmax(jnp.einsum("bs,bsh->bh", scores, cache) @ params["embed"].T, -1)

    params = {"embed": jnp.asarray(np.random.default_rng(0).standard_normal((32, 16), np.float32))}
    cache, token = jnp.zeros((8, 4, 16)), jnp.arange(8)
    step = autopar.parallelize(generate, cluster=CLUSTER)
    want_cache, want_token = cache, token
    for _ in range(3):
        cache, token = step(params, cache, token)
        want_cache, want_token = generate(params, want_cache, want_token)
        assert_trees_same((cache, token), (want_cache, want_token))
    seen = moved(monkeypatch)
    step(params, cache, token)
    assert (8, 4, 16) not in seen


def test_a_stack_that_is_indexed_in_python_is_a_model():
    def scores(q, b):
        h = b["x"]
        for i in range(len(q)):
            h = jnp.tanh(h @ q[i])
        return h.sum()

    found = roles(scores, jnp.ones((3, 16, 16)), batch())
    assert found == {"q": "parameter", "b['x']": "batch"}
