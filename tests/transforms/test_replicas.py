"""Replicas of a step: the identities of local SGD and DiLoCo, fragments, lost islands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.errors import AutoparError
from autopar.transforms import Streaming, diloco, local_sgd, per_replica, per_replica_value_and_grad
from tests.api.steps import batch, loss_fn, params

ADAM = optax.adamw(1e-2)
SGD = optax.sgd(0.1)


def step_of(tx):
    def step(state, data):
        value, grads = jax.value_and_grad(loss_fn)(state["params"], data["x"], data["y"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def first_state(tx, dtype=jnp.float32):
    p = jax.tree.map(lambda x: x.astype(dtype), params())
    return {"params": p, "opt": tx.init(p)}


def data(seed, size=16, dtype=jnp.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), batch(size, seed=seed))


def run(step, state, batches, compiled=True):
    """The state after some batches; not compiled, each operator runs by itself, so that fusion rounds nothing."""
    step = jax.jit(step) if compiled else step
    for b in batches:
        state, _ = step(state, b)
    return state


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, tolerance=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize(
    "make", [lambda s: local_sgd(s, 1, 3), lambda s: diloco(s, 1, 3, outer_rate=1.0, outer_momentum=0.0)]
)
def test_one_replica_at_rate_one_is_plain_training_to_the_bit(make):
    step = step_of(ADAM)
    batches = [data(s) for s in range(7)]
    outer = make(step)
    ours = run(outer, outer.init(first_state(ADAM)), batches, compiled=False)
    theirs = run(step, first_state(ADAM), batches, compiled=False)
    assert_equal(jax.tree.map(lambda x: x[0], ours.replicas), theirs)
    assert int(ours.count) == 7


def test_an_exchange_every_step_with_plain_sgd_is_data_parallel(x64):
    step = step_of(SGD)
    batches = [data(s, dtype=jnp.float64) for s in range(5)]
    outer = diloco(step, 4, 1, outer_rate=1.0, outer_momentum=0.0)
    ours = run(outer, outer.init(first_state(SGD, jnp.float64)), batches)
    assert_close(outer.drain(ours)["params"], run(step, first_state(SGD, jnp.float64), batches)["params"])


def test_replicas_train_by_themselves_between_exchanges():
    step = step_of(ADAM)
    batches = [data(s) for s in range(2)]
    outer = local_sgd(step, 2, 3)
    state = run(outer, outer.init(first_state(ADAM)), batches)
    for n in range(2):
        alone = run(step, first_state(ADAM), [jax.tree.map(lambda x, n=n: x[8 * n : 8 * n + 8], b) for b in batches])
        assert_close(jax.tree.map(lambda x, n=n: x[n], state.replicas), alone, 1e-6)
    assert not np.allclose(state.replicas["params"]["w"][0], state.replicas["params"]["w"][1])
    state = run(outer, state, [data(2)])
    assert_equal(state.replicas["params"]["w"][0], state.replicas["params"]["w"][1])
    assert not np.allclose(state.replicas["opt"][0].mu["w"][0], state.replicas["opt"][0].mu["w"][1])


def test_outer_step_is_nesterovs(x64):
    """Against optax, which knows nothing of replicas: the outer gradient is theta minus the mean."""
    step, tx = step_of(ADAM), optax.sgd(0.7, momentum=0.9, nesterov=True)
    outer = diloco(step, 2, 2)
    state = outer.init(first_state(ADAM, jnp.float64))
    theta = first_state(ADAM, jnp.float64)["params"]
    opt = tx.init(theta)
    for s in range(6):
        state, _ = jax.jit(outer.inner)(state, data(s, dtype=jnp.float64))
        if outer.due(s + 1):
            change = jax.tree.map(lambda t, r: t - jnp.mean(r, axis=0), theta, state.replicas["params"])
            updates, opt = tx.update(change, opt)
            theta = optax.apply_updates(theta, updates)
            state = outer.merge(outer.outer(state))
            assert_close(outer.drain(state)["params"], theta)
    assert [outer.due(t) for t in range(1, 5)] == [(), (0,), (), (0,)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fragments_that_are_due_at_once_are_no_fragments(momentum):
    step = step_of(ADAM)
    batches = [data(s) for s in range(6)]
    whole = diloco(step, 2, 3, outer_momentum=momentum)
    parts = diloco(step, 2, 3, outer_momentum=momentum, streaming=Streaming(2, offsets=(0, 0)))
    assert_equal(run(whole, whole.init(first_state(ADAM)), batches), run(parts, parts.init(first_state(ADAM)), batches))


def test_a_program_with_branches_is_the_same_as_its_parts():
    """Streaming with overlap and mixing, step by step: what `due` and `merging` say is what a call does."""
    step = step_of(ADAM)
    outer = diloco(step, 2, 4, streaming=Streaming(2, overlap_steps=1, mixing=0.25), format="int8")
    one, parts = outer.init(first_state(ADAM)), outer.init(first_state(ADAM))
    together, inner = jax.jit(outer), jax.jit(outer.inner)
    done = []
    for s in range(8):
        one, _ = together(one, data(s))
        parts, _ = inner(parts, data(s))
        for p in outer.due(s + 1):
            parts = jax.jit(outer.outer, static_argnums=1)(parts, p)
        for p in outer.merging(s + 1):
            parts = jax.jit(outer.merge, static_argnums=1)(parts, p)
        done.append((outer.due(s + 1), outer.merging(s + 1)))
        assert_close(one, parts, 1e-6)
    assert done == [((), ()), ((1,), ()), ((), (1,)), ((0,), ()), ((), (0,)), ((1,), ()), ((), (1,)), ((0,), ())]


@pytest.mark.slow
def test_mixing_keeps_a_part_of_the_replicas_own():
    step = step_of(SGD)
    outer = diloco(step, 2, 1, streaming=Streaming(mixing=0.25))
    state, _ = outer.inner(outer.init(first_state(SGD)), data(0))
    local = state.replicas["params"]["w"]
    state = outer.outer(state)
    theta = outer.drain(state)["params"]["w"]
    assert_close(outer.merge(state).replicas["params"]["w"], 0.25 * local + 0.75 * theta[None], 1e-6)


@pytest.mark.slow
def test_lost_islands_do_not_count(x64):
    step = step_of(SGD)
    outer = local_sgd(step, 4, 1)
    state, _ = outer.inner(outer.init(first_state(SGD, jnp.float64)), data(0, dtype=jnp.float64))
    broken = jax.tree.map(lambda x: x.at[2].set(jnp.nan), state.replicas["params"])
    state = type(state)(
        {**state.replicas, "params": broken}, *(getattr(state, n) for n in ("outer", "velocity", "count"))
    )
    after = outer.merge(outer.outer(state, 0, jnp.array([1, 1, 0, 1])))
    wanted = jnp.mean(state.replicas["params"]["w"][jnp.array([0, 1, 3])], axis=0)
    for n in range(4):  # the lost one takes the parameters of the others
        assert_close(after.replicas["params"]["w"][n], wanted)


def test_few_bits_cost_little_and_say_their_bytes():
    step = step_of(ADAM)
    batches = [data(s) for s in range(8)]
    whole, narrow = diloco(step, 2, 2), diloco(step, 2, 2, format="int4")
    a = whole.drain(run(whole, whole.init(first_state(ADAM)), batches))["params"]
    b = narrow.drain(run(narrow, narrow.init(first_state(ADAM)), batches))["params"]
    change = max(
        float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(params()), jax.tree.leaves(a), strict=True)
    )
    error = max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert 0 < error < change / 7
    assert whole.bytes_a_step(first_state(ADAM)) == (16 * 8 + 8) * 4 / 2
    # Blocks of 8 elements of 4 bits and a scale: 8 bits an element.
    assert narrow.bytes_a_step(first_state(ADAM)) == (16 * 8 + 8) * 1 / 2


@pytest.mark.slow
def test_gradients_of_replicas_are_those_of_the_parts(x64):
    p, d = first_state(SGD, jnp.float64)["params"], data(0, dtype=jnp.float64)
    values, grads = per_replica_value_and_grad(loss_fn, 4)(p, d["x"], d["y"])
    for n in range(4):
        value, grad = jax.value_and_grad(loss_fn)(p, d["x"][4 * n : 4 * n + 4], d["y"][4 * n : 4 * n + 4])
        assert_close((values[n], jax.tree.map(lambda g, n=n: g[n], grads)), (value, grad))
    assert_close(jax.tree.map(lambda g: jnp.mean(g, 0), grads), jax.grad(loss_fn)(p, d["x"], d["y"]))


def test_replicas_have_keys_of_their_own():
    def step(state, x):
        key, use = jax.random.split(state["key"])
        return {"key": key}, jax.random.normal(use) + jnp.mean(x)

    two = per_replica(step, 2)
    state = two.init({"key": jax.random.key(3)})
    _, values = two(state, jnp.zeros(4))
    assert values.shape == (2,) and values[0] != values[1]
    assert values[0] == step({"key": jax.random.key(3)}, jnp.zeros(2))[1]


def test_wrong_options_are_refused():
    step = step_of(SGD)
    with pytest.raises(AutoparError, match="16 examples for 3 replicas"):
        per_replica(step, 3)(per_replica(step, 3).init(first_state(SGD)), data(0))
    with pytest.raises(AutoparError, match="replicas=0"):
        local_sgd(step, 0, 1)
    with pytest.raises(AutoparError, match="period=0"):
        local_sgd(step, 2, 0)
    with pytest.raises(AutoparError, match="3 fragments do not fit"):
        diloco(step, 2, 2, streaming=Streaming(3))
    with pytest.raises(AutoparError, match="overlap_steps=2"):
        diloco(step, 2, 2, streaming=Streaming(overlap_steps=2))
    with pytest.raises(AutoparError, match="offsets"):
        diloco(step, 2, 2, streaming=Streaming(2, offsets=(0,)))
    with pytest.raises(AutoparError, match="mixing=1"):
        diloco(step, 2, 2, streaming=Streaming(mixing=1.0))
    with pytest.raises(AutoparError, match="'int3'"):
        diloco(step, 2, 2, format="int3")
