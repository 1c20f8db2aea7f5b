"""Sums of products in 16 bits that norms read in 32: activations are sent narrow, gradients of parameters wide."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.search import Manual

CLUSTER = autopar.Cluster.load("dgx-a100")
WIDTH, TOKENS = 256, 512
MANY_TOKENS = 16384


def step(params, batch):
    def loss(params):
        y = jax.nn.relu(batch["x"] @ params["up"].astype(jnp.bfloat16)) @ params["down"].astype(jnp.bfloat16)
        y = y.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        return jnp.mean(y * y * params["scale"])

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def arguments(tokens):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {"up": f32(WIDTH, 4 * WIDTH), "down": f32(4 * WIDTH, WIDTH), "scale": f32(WIDTH)}
    return params, {"x": jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)}


def sums(tokens, **degrees):
    devices = degrees.get("tp", 1) * degrees.get("dp", 1)
    (group,) = CLUSTER.groups
    cluster = autopar.Cluster("part", (type(group)(1, devices, group.device, group.intra, group.inter),))
    plan = autopar.parallelize(step, cluster=cluster, search=Manual(**degrees), num_microbatches=1).plan(
        *arguments(tokens)
    )
    return [m.bytes for m in plan.communication if m.kind in ("all-reduce", "reduce-scatter") and m.bytes > 4096]


def test_activations_are_summed_before_they_are_made_wider():
    assert set(sums(TOKENS, tp=4)) == {2 * TOKENS * WIDTH}


@pytest.mark.slow
def test_gradients_of_parameters_are_summed_as_wide_as_they_are_kept():
    assert set(sums(MANY_TOKENS, dp=4)) == {4 * (4 * WIDTH * WIDTH)}
