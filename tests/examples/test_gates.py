"""Gates of the mixture of experts against slow loops in numpy, and the layer against a loop over tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from examples import moe
from examples._gates import Routing, expert_capacity, gshard_gate, switch_gate
from tests.examples.quick import quick_jit, quick_metrics

Array = NDArray[np.float64]

# Few cases of (groups, tokens, experts) and capacity, so that jax compiles few programs.
cases = st.sampled_from([((1, 6, 2), 1), ((2, 8, 4), 2), ((3, 5, 3), 5)])
seeds = st.integers(0, 2**31 - 1)


@functools.cache
def compiled(gate: Callable[..., Routing], capacity: int) -> Callable[..., Any]:
    def run(logits: jax.Array, *key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        routing = gate(logits, capacity, *key)
        return routing.combine, routing.dispatch, routing.loss

    return quick_jit(run)


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def slow_gshard(logits: Array, capacity: int, keep_second: NDArray[np.bool_]) -> tuple[Array, float]:
    groups, tokens, experts = logits.shape
    combine = np.zeros((groups, tokens, experts, capacity))
    losses = []
    for g in range(groups):
        gates = softmax(logits[g])
        order = np.argsort(-gates, axis=-1, kind="stable")
        used = np.zeros(experts, int)
        for s in range(tokens):
            e1, e2 = order[s, :2]
            if used[e1] < capacity:
                combine[g, s, e1, used[e1]] = gates[s, e1] / (gates[s, e1] + gates[s, e2])
            used[e1] += 1
        losses.append(sum(used[e] / tokens * gates[:, e].mean() for e in range(experts)) / experts)
        for s in range(tokens):
            e1, e2 = order[s, :2]
            if not keep_second[g, s]:
                continue
            if used[e2] < capacity:
                combine[g, s, e2, used[e2]] = gates[s, e2] / (gates[s, e1] + gates[s, e2])
            used[e2] += 1
    return combine, float(np.mean(losses))


def slow_switch(logits: Array, capacity: int) -> tuple[Array, float]:
    groups, tokens, experts = logits.shape
    combine = np.zeros((groups, tokens, experts, capacity))
    losses = []
    for g in range(groups):
        gates = softmax(logits[g])
        used = np.zeros(experts, int)
        for s in range(tokens):
            e = int(np.argmax(gates[s]))
            if used[e] < capacity:
                combine[g, s, e, used[e]] = gates[s, e]
            used[e] += 1
        losses.append(experts * sum(used[e] / tokens * gates[:, e].mean() for e in range(experts)))
    return combine, float(np.mean(losses))


def draw(shape: tuple[int, int, int], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


@settings(deadline=None, max_examples=30)
@given(case=cases, seed=seeds)
def test_gshard_matches_the_loop(case: tuple[tuple[int, int, int], int], seed: int) -> None:
    shape, capacity = case
    logits = draw(shape, seed)
    combine, loss = slow_gshard(logits, capacity, np.ones(shape[:2], bool))
    with jax.enable_x64(True):
        combined, dispatch, aux = compiled(gshard_gate, capacity)(jnp.asarray(logits))
        np.testing.assert_allclose(combined, combine, atol=1e-12)
        np.testing.assert_array_equal(dispatch, combine > 0)
        assert float(aux) == pytest.approx(loss, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(case=cases, seed=seeds)
def test_switch_matches_the_loop(case: tuple[tuple[int, int, int], int], seed: int) -> None:
    shape, capacity = case
    logits = draw(shape, seed)
    combine, loss = slow_switch(logits, capacity)
    with jax.enable_x64(True):
        combined, dispatch, aux = compiled(switch_gate, capacity)(jnp.asarray(logits))
        np.testing.assert_allclose(combined, combine, atol=1e-12)
        np.testing.assert_array_equal(dispatch, combine > 0)
        assert float(aux) == pytest.approx(loss, abs=1e-12)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(case=cases, seed=seeds)
def test_random_routing_matches_the_loop(case: tuple[tuple[int, int, int], int], seed: int) -> None:
    shape, capacity = case
    logits = draw(shape, seed)
    pair = np.sort(np.stack([softmax(row) for row in logits]), axis=-1)[..., -2:]
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        drawn = np.asarray(jax.random.uniform(key, (*shape[:2], 1), jnp.float64))[..., 0]
        combine, loss = slow_gshard(logits, capacity, drawn < 2 * pair[..., 0] / pair.sum(-1))
        combined, _, aux = compiled(gshard_gate, capacity)(jnp.asarray(logits), key)
        np.testing.assert_allclose(combined, combine, atol=1e-12)
        assert float(aux) == pytest.approx(loss, abs=1e-12)


@pytest.mark.slow
def test_losses_at_known_points() -> None:
    even = jnp.asarray(np.tile(30.0 * np.eye(4), (1, 3, 1)), jnp.float32)
    skewed = jnp.asarray(np.tile([30.0, 0.0, 0.0, 0.0], (1, 12, 1)), jnp.float32)
    # Even load is the least: Switch gives 1, GShard 1 / E**2. All tokens on one expert give E and 1 / E.
    assert float(switch_gate(even, 3).loss) == pytest.approx(1.0, rel=1e-5)
    assert float(switch_gate(skewed, 3).loss) == pytest.approx(4.0, rel=1e-5)
    assert float(gshard_gate(even, 6).loss) == pytest.approx(1 / 16, rel=1e-5)
    assert float(gshard_gate(skewed, 6).loss) == pytest.approx(1 / 4, rel=1e-5)


def test_second_choice_is_another_expert_when_gates_underflow() -> None:
    logits = jnp.asarray([[[500.0, 0.0, -1.0]]], jnp.float32)
    dispatch = gshard_gate(logits, 1).dispatch
    np.testing.assert_array_equal(dispatch[0, 0, :, 0], [1, 1, 0])


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "factor", "expected"),
    [(2048, 8, 2, 1.0, 512), (2048, 48, 2, 1.0, 86), (2048, 16, 1, 1.25, 160), (4, 64, 1, 1.0, 1)],
)
def test_capacity(tokens: int, experts: int, choices: int, factor: float, expected: int) -> None:
    assert expert_capacity(tokens, experts, choices, factor) == expected


@pytest.mark.parametrize("gate", moe.GATES)
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_layer_matches_a_loop_over_tokens(gate: str, factor: float) -> None:
    with jax.enable_x64(True):
        config = moe.Config(hidden=6, ffn=10, experts=4, group=8, gate=gate, capacity_factor=factor, dtype="float64")
        rng = np.random.default_rng(3)
        w = {
            "router": rng.normal(size=(6, 4)),
            "up": rng.normal(size=(4, 6, 10)),
            "down": rng.normal(size=(4, 10, 6)),
        }
        x = rng.normal(size=(2, 8, 6))
        y, loss = moe.moe_layer(config, {k: jnp.asarray(v) for k, v in w.items()}, jnp.asarray(x))
    capacity = expert_capacity(8, 4, moe.CHOICES[gate], factor)
    logits = x @ w["router"]
    if gate == "gshard":
        combine, expected_loss = slow_gshard(logits, capacity, np.ones((2, 8), bool))
    else:
        combine, expected_loss = slow_switch(logits, capacity)
    weight = combine.sum(-1)
    expected = np.zeros_like(x)
    for g, s, e in np.argwhere(weight > 0):
        expected[g, s] += weight[g, s, e] * (np.maximum(x[g, s] @ w["up"][e], 0) @ w["down"][e])
    np.testing.assert_allclose(y, expected, atol=1e-12)
    assert float(loss) == pytest.approx(expected_loss, abs=1e-12)
    dropped = (weight > 0).sum() < 16 * moe.CHOICES[gate]
    assert dropped == (factor == 0.5)


@pytest.mark.slow
def test_loss_has_the_weighted_auxiliary_loss() -> None:
    losses = {}
    for weight in (0.0, 1.0):
        step, args = moe.build(gate="switch", aux_weight=weight)
        losses[weight] = quick_metrics(step)(*args)
    assert float(losses[1.0]["aux_loss"]) >= 0.99  # one mixture, and an even load gives 1
    assert float(losses[1.0]["loss"] - losses[0.0]["loss"]) == pytest.approx(float(losses[1.0]["aux_loss"]), rel=1e-4)


@pytest.mark.slow
def test_random_routing_depends_on_the_step_only() -> None:
    step, (state, batch) = moe.build(random_routing=True)
    assert state["rng"].shape == (2,)
    compiled = quick_metrics(step)
    first, again = (float(compiled(state, batch)["loss"]) for _ in range(2))
    later = float(compiled({**state, "step": state["step"] + 1}, batch)["loss"])
    assert first == again
    assert first != later


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"gate": "soft"}, "known: gshard, switch"),
        ({"group": 48}, "batch times seq by group: 128 is not a multiple of 48"),
        ({"gate": "switch", "random_routing": True}, "random_routing is of gate='gshard'"),
        ({"experts": 1}, "needs 2 or more"),
    ],
)
def test_impossible_options_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe.build(abstract=True, **overrides)
