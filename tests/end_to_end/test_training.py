"""Ways in which people write train steps: several optimizers, accumulation, loss scaling, inner loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.api.steps import batch, loss_fn, params, sgd
from tests.end_to_end.clusters import FAST, MIDDLE, SLOW
from tests.end_to_end.compare import assert_same


def two_models():
    a, b = optax.adam(1e-2), optax.sgd(1e-1, momentum=0.9)

    def step(state, data):
        def loss(pa, pb):
            y = jnp.tanh(data["x"] @ pa["w"] + pa["b"])
            return jnp.mean((data["x"] @ pb["w"] + pb["b"] - y) ** 2), y.std()

        (value, aux), (ga, gb) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(state["a"], state["b"])
        ua, oa = a.update(ga, state["oa"], state["a"])
        ub, ob = b.update(gb, state["ob"], state["b"])
        new = {"a": optax.apply_updates(state["a"], ua), "b": optax.apply_updates(state["b"], ub), "oa": oa, "ob": ob}
        return new, {"loss": value, "aux": aux}

    pa, pb = params(0), params(1)
    return step, {"a": pa, "b": pb, "oa": a.init(pa), "ob": b.init(pb)}


def multi_steps():
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), every_k_schedule=2)

    def step(state, data):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], data["x"], data["y"])
        updates, opt = tx.update(grads, state["opt"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, loss

    return step, {"p": params(), "opt": tx.init(params())}


def accumulated():
    def step(state, data):
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)

        def body(carry, part):
            loss, grads = jax.value_and_grad(loss_fn)(state, part["x"], part["y"])
            return jax.tree.map(jnp.add, carry, (loss, grads)), loss

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state))
        (loss, grads), losses = jax.lax.scan(body, zero, parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / 4, state, grads), (loss / 4, losses)

    return step, params()


def inner_loop():
    def step(state, data):
        return jax.lax.fori_loop(0, 3, lambda _, p: sgd(p, data)[0], state), jnp.float32(3)

    return step, params()


def loss_scaling():
    def step(state, data):
        def scaled(p):
            half = jax.tree.map(lambda x: x.astype(jnp.float16), (p, data))
            loss = loss_fn(half[0], half[1]["x"], half[1]["y"]).astype(jnp.float32)
            return loss * state["scale"], loss

        grads, loss = jax.grad(scaled, has_aux=True)(state["p"])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)
        fine = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        p = jax.lax.cond(fine, lambda: jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads), lambda: state["p"])
        scale = jnp.where(fine, state["scale"], state["scale"] / 2)
        return {"p": p, "scale": scale}, {"loss": loss, "fine": fine}

    return step, {"p": params(), "scale": jnp.float32(2.0**20)}


CASES = {f.__name__: f for f in (two_models, multi_steps, accumulated, inner_loop, loss_scaling)}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_a_step(name, mesh_shape):
    step, state = CASES[name]()
    rtol = 1e-2 if name == "loss_scaling" else 1e-4
    assert_same(step, (state, batch(32)), steps=3, rtol=rtol, mesh_shape=mesh_shape, cluster=MIDDLE)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [FAST, SLOW], ids=["fast links", "slow links"])
def test_clusters(cluster):
    step, state = two_models()
    f = assert_same(step, (state, batch(32)), steps=3, rtol=1e-4, cluster=cluster)
    data = f.plan(state, batch(32)).content.inputs
    assert any("x" in i.layout for i in data) or cluster is SLOW


@pytest.mark.slow
def test_little_memory_splits_the_state():
    step, state = two_models()
    big = jax.tree.map(lambda x: jnp.ones((512, *x.shape[1:]), x.dtype) * 0.01 if x.ndim == 2 else x, state)
    data = batch(16, hidden=512)
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(big))
    f = assert_same(step, (big, data), steps=2, rtol=1e-4, cluster=MIDDLE, memory_limit=whole)
    assert f.plan(big, data).peak_memory <= whole
    ours = f.init(lambda: big)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(ours))
    assert held < whole / 2


def test_vmap_of_a_step():
    states = jax.tree.map(lambda *x: jnp.stack(x), *(params(i) for i in range(4)))
    data = jax.tree.map(lambda *x: np.stack(x), *(batch(16, seed=i) for i in range(4)))
    assert_same(jax.vmap(sgd), (states, data), steps=2, cluster=MIDDLE)
