"""Mixtures of experts without a capacity: sorted tokens, products of groups of rows, split over tokens or experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.search.problems import toy

TOKENS = 64


def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Each token goes to one expert; tokens are sorted by expert, as in megablox."""
    gates = jax.nn.softmax(x @ p["gate"])
    expert = jnp.argmax(gates, axis=1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=p["gate"].shape[1])
    rows = x[order]
    inner = jax.nn.relu(jax.lax.ragged_dot(rows, p["up"], sizes))
    out = jax.lax.ragged_dot(inner, p["down"], sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return ((back * jnp.take_along_axis(gates, expert[:, None], 1) - y) ** 2).mean()


def step(p: Any, x: jax.Array, y: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(p, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def arguments(tokens: int, experts: int) -> tuple[Any, jax.Array, jax.Array]:
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape))

    p = {"gate": drawn(5, experts), "up": drawn(experts, 5, 7), "down": drawn(experts, 7, 5)}
    return p, drawn(tokens, 5), drawn(tokens, 5)


@pytest.mark.parametrize(("tokens", "experts"), [(61, 8), (64, 7)])
def test_products_are_split_over_experts_and_over_tokens(tokens: int, experts: int) -> None:
    """Of the sizes only one is divided by the devices: where it is that of the experts matrices are split by expert."""
    with jax.enable_x64(True):
        args = arguments(tokens, experts)
        run = autopar.parallelize(
            step, cluster=toy(8, flops=1e6), num_stages=1, num_microbatches=1, padding=False, constraints={"p/**": ()}
        )
        got = run(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, jax.jit(step)(*args))
        products = [o for o in run.plan(*args).content.operators if "ragged_dot" in o.id]
    assert len(products) >= 5
    layouts = [text for o in products for text in (*o.operands, *o.results)]
    assert all(
        any(axis in text for axis in "xy") for text in (o.operands[0] + o.operands[1] + o.results[0] for o in products)
    ), layouts
    assert any(text.startswith(("[x", "[y")) for text in layouts)


def test_matrices_of_experts_stay_where_they_lie() -> None:
    """Where matrices are large next to tokens a device keeps its experts, and no matrix or gradient of one is sent."""
    f32 = jnp.float32
    shapes = {"gate": (64, 8), "up": (8, 64, 1024), "down": (8, 1024, 64)}
    p = {n: jax.ShapeDtypeStruct(s, f32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((TOKENS, 64), f32)
    plan = autopar.parallelize(step, cluster=toy(8), num_stages=1, num_microbatches=1, padding=False).plan(p, x, x)
    assert plan.communication
    assert max(c.bytes for c in plan.communication) < 8 * 64 * 1024 * 4 / 2
