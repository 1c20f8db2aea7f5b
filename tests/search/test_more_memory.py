"""A plan within more memory is about as fast as one within less, and its bound holds for both.

The two are not equally fast to the last digit: the integer program counts a conversion for each of its readers, and
of choices that cost the same by that count some share more of them.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.plan import Plan
from tests.end_to_end.test_copies_in_nodes import NODES, half_precision_loss


def momentum(state, x):
    """A step of layers of bf16 products with f32 parameters and moments."""
    weights, means = state

    value, grads = jax.value_and_grad(half_precision_loss)(weights, x)
    means = [0.9 * m + 0.1 * g for m, g in zip(means, grads, strict=True)]
    return ([w - 1e-3 * m for w, m in zip(weights, means, strict=True)], means), value


def plan_within(limit: int | None, layers: int, width: int, batch: int) -> Plan:
    """The plan of one mesh within a limit in bytes a device."""
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32) for _ in range(layers)]
    asked = {"mesh_shape": (2, 4), "num_stages": 1, "num_microbatches": 1, "remat": "none"}
    function = autopar.parallelize(momentum, cluster=NODES, donate_argnums=0, memory_limit=limit, **asked)
    return function.plan((weights, weights), jax.ShapeDtypeStruct((batch, width), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_less_memory_is_no_faster(seed):
    """Limits are drawn below what the plan without a limit takes."""
    draw = random.Random(seed)
    layers, width, batch = draw.choice([2, 3]), draw.choice([128, 256, 512]), draw.choice([512, 1024, 2048])
    free = plan_within(None, layers, width, batch)
    plans = [free]
    for share in sorted((draw.uniform(0.75, 0.99) for _ in range(5)), reverse=True):
        try:
            plans.append(plan_within(int(share * free.peak_memory), layers, width, batch))
        except autopar.InfeasiblePlanError:
            break
    assert len(plans) > 2
    assert plans[-1].step_time > free.step_time
    for n, more in enumerate(plans):
        for less in plans[n + 1 :]:
            assert more.step_time <= 1.04 * less.step_time
            assert more.search.lower_bound <= less.step_time * (1 + 1e-9)
