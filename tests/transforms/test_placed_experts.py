"""Experts in another order: values of the plain step, and what is sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import autopar
from autopar.errors import AutoparError
from autopar.transforms import PlacedState, balanced_order, placed_experts
from tests.end_to_end.compare import assert_trees_same
from tests.search.problems import toy

EXPERTS, CAPACITY, WIDTH, INNER = 8, 4, 4, 6
OPTIMIZER = optax.adam(1e-2)


def mixture(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A layer of experts with slots of a capacity, x [groups, tokens, width]; and how many tokens ask for each."""
    gates = jax.nn.softmax(x @ w["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=x.dtype)
    slots = jax.nn.one_hot((jnp.cumsum(chosen, 1) * chosen).astype(jnp.int32) - 1, CAPACITY, dtype=x.dtype)
    inner = jax.nn.relu(jnp.einsum("gsec,gsm,emh->egch", slots, x, w["up"]) + w["bias"][:, None, None])
    out = jnp.einsum("egch,ehm->egcm", inner, w["down"])
    return x + jnp.einsum("gsec,gse,egcm->gsm", slots, gates, out), chosen.sum((0, 1))


def step(state: Any, x: jax.Array) -> Any:
    """Layers of experts in Python and in a loop, of which each is recomputed, by Adam with a global norm."""

    def loss(p: Any) -> Any:
        h, loads = mixture(p["first"], x)
        h, more = jax.lax.scan(lambda h, w: jax.checkpoint(mixture)(w, h), h, p["stack"])
        return jnp.mean((h - x) ** 2), loads + more.sum(0)

    params, moments = state
    (value, loads), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    updates, moments = OPTIMIZER.update(jax.tree.map(lambda g: g / (1 + norm), grads), moments, params)
    return (optax.apply_updates(params, updates), moments), value, loads


def experts(path: str) -> int | None:
    """The dim of experts: behind that of the layers in stacks."""
    if path.rpartition(".")[2] not in ("up", "down", "bias"):
        return None
    return 1 if ".stack." in path else 0


def arguments() -> tuple[Any, jax.Array]:
    random = np.random.default_rng(5)

    def layer(*lead: int) -> Any:
        shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH)}
        shapes["bias"] = (EXPERTS, INNER)
        return {n: jnp.asarray(random.standard_normal((*lead, *shape))) for n, shape in shapes.items()}

    params = {"first": layer(), "stack": layer(2)}
    return (params, OPTIMIZER.init(params)), jnp.asarray(random.standard_normal((8, 16, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize("planned", [False, True])
def test_results_are_those_of_the_plain_step_while_experts_move(planned: bool) -> None:
    with jax.enable_x64(True):
        plain, x = arguments()
        placed_step = placed_experts(step, experts)
        options: dict[str, Any] = {"cluster": toy(8), "num_stages": 1, "num_microbatches": 1}
        run = autopar.parallelize(placed_step, **options) if planned else jax.jit(placed_step)
        placed = placed_step.init(plain, np.random.default_rng(0).permutation(EXPERTS))
        for _ in range(3):
            plain, value, loads = jax.jit(step)(plain, x)
            placed, got, seen = run(placed, x)
            assert_trees_same((got, seen), (value, loads), rtol=1e-10)
            assert_trees_same(placed_step.plain(placed), plain, rtol=1e-8)
            order = balanced_order(loads, 4)
            placed = placed_step.moved(placed, order)
            np.testing.assert_array_equal(placed.order, order)
            up = placed.state[0]["first"]["up"]
            np.testing.assert_allclose(up, plain[0]["first"]["up"][order], 1e-8, 1e-10)


def test_parameters_of_experts_are_never_moved_in_a_step() -> None:
    """Gathers of the placed step are of what is made of tokens: none has the shape of a parameter or a moment."""
    plain, x = arguments()
    placed_step = placed_experts(step, experts)
    jaxpr = jax.make_jaxpr(placed_step)(placed_step.init(plain), x)
    large = {(*lead, *s) for lead in ((), (2,)) for s in ((EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH))}
    gathered = list(_gathered(jaxpr.jaxpr))
    assert gathered
    assert not large.intersection(gathered)


def _gathered(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "gather":
            yield eqn.invars[0].aval.shape
        for inner in jaxprs_in_params(eqn.params):
            yield from _gathered(inner)


def test_experts_stay_on_their_devices() -> None:
    """Large experts are split over devices, tokens go to them by all-to-all, as without a placement."""
    shapes = {"router": (64, 8), "up": (8, 64, 2048), "down": (8, 2048, 64), "bias": (8, 2048)}
    p = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)

    def small(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(mixture(w, x)[0] ** 2))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    placed_step = placed_experts(small, experts)
    options: dict[str, Any] = {"cluster": toy(8), "num_stages": 1, "num_microbatches": 1}
    placed = PlacedState(p, jax.ShapeDtypeStruct((8,), jnp.int32))
    plain = autopar.parallelize(small, **options).plan(p, x)
    plan = autopar.parallelize(placed_step, **options).plan(placed, x)
    kinds = [{c.kind for c in q.communication} for q in (plain, plan)]
    assert all("all-to-all" in k for k in kinds)
    sent = [sum(c.bytes * c.count for c in q.communication) for q in (plain, plan)]
    assert sent[1] <= 1.5 * sent[0]
    assert max(c.bytes for c in plan.communication) < 8 * 64 * 2048 * 4 / 8


def test_a_step_without_experts_is_refused() -> None:
    with pytest.raises(AutoparError, match="no experts"):
        placed_experts(step, lambda path: None).init(arguments()[0])
    with pytest.raises(AutoparError, match="no equal parts"):
        balanced_order([1.0] * 6, 4)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_loads_are_balanced(loads: list[int], devices: int) -> None:
    """Every expert has a place; the largest load is at most that of any order if there are two experts a device."""
    order = balanced_order(loads, devices)
    assert sorted(order) == list(range(8))
    most = max(np.asarray(loads)[order].reshape(devices, -1).sum(1))
    assert most <= sum(loads) / devices + max(loads)
    if devices == 4:  # pairs: no other order has a smaller largest sum than the largest with the smallest, and so on
        ranked = sorted(loads)
        assert most <= max(a + b for a, b in zip(ranked[:4], ranked[:3:-1], strict=True))
