"""Stacked layers of a scan are gathered one at a time inside the loop, forward and backward, where memory is short."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import parallelize
from autopar.lower.hlo import collectives
from tests.end_to_end.test_update_in_backward import bytes_used
from tests.search.problems import toy
from tests.versions import tolerance

LAYERS, WIDTH, INNER = 8, 64, 128

#: Bytes of one layer's parameter, and of all parameters.
LAYER, STATE = WIDTH * INNER * 8, 2 * LAYERS * WIDTH * INNER * 8


def train_step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        up, down = weights
        return h + jnp.tanh(h @ up) @ down, None

    def loss(p: Any) -> jax.Array:
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(batch: int) -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(batch)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]))

    return (draw(LAYERS, WIDTH, INNER), draw(LAYERS, INNER, WIDTH)), draw(batch, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [512, pytest.param(1024, marks=pytest.mark.slow)])
def test_one_layer_at_a_time(batch: int) -> None:
    """Room for what is split eight ways, two layers and the activations, not for a stack."""
    activations = (LAYERS + 9) * batch // 8 * WIDTH * 8
    with jax.enable_x64(True):
        args = arguments(batch)
        program = parallelize(
            train_step, cluster=toy(8, flops=1e12, bandwidth=1e9), donate_argnums=0,
            memory_limit=2 * STATE // 8 + 4 * LAYER + activations, batch_argnums=1,
            num_stages=1, num_microbatches=1, remat="none", mesh_shape=(8,),
        ).compile(*args)  # fmt: skip
        sent = Counter((c.kind, c.full_bytes, c.times) for c in collectives(program.as_text()) if c.full_bytes > 8)
        want = jax.jit(train_step)(*args)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-12), program(*args), want)
    # Both parameters, in the forward and in the backward loop: of one layer each, as often as there are layers.
    assert sent == {("all-gather", LAYER, LAYERS): 4, ("reduce-scatter", LAYER, LAYERS): 2}
    predicted = {(c.kind, c.bytes): c.count for c in program.plan.communication if c.bytes > 8}
    assert predicted == {("all-gather", LAYER): 4 * LAYERS, ("reduce-scatter", LAYER): 2 * LAYERS}
    assert bytes_used(program) == pytest.approx(program.plan.peak_memory, rel=tolerance(0.1, 0.05))
