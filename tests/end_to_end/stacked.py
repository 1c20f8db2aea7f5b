"""A step whose layers lie in stacks that it scans over, small enough to be compiled for any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.transforms import interchanged


def build(layers, *, width=16, batch=8, dtype=jnp.float32, norm=None, microbatches=1):
    """A residual network in ``jax.lax.scan``, its blocks checkpointed, with Adam written out.

    Args:
        layers: number of them.
        width: of the residual stream; blocks are four times as wide inside.
        batch: examples.
        dtype: of all arrays.
        norm: most that the gradients' global norm may be; None does not clip.
        microbatches: into which each layer deals out the examples; 1 takes them at once.
    """

    def loss(params, x):
        def layer(y, own):
            return y + jnp.tanh(y @ own["up"]) @ own["down"], None

        block = jax.checkpoint(layer) if microbatches == 1 else interchanged(layer, microbatches)
        y, _ = jax.lax.scan(block, x @ params["in"], params["layers"])
        return jnp.mean(y**2)

    def step(state, x):
        params, first, second, count = state
        value, grads = jax.value_and_grad(loss)(params, x)
        if norm is not None:
            total = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, norm / total), grads)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)

        def moved(p, m, v):
            return p - 0.01 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)

        return (jax.tree.map(moved, params, first, second), first, second, count), {"loss": value}

    def drawn(number, *shape):
        return 0.3 * jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape, dtype)

    params = {
        "in": drawn(0, width, width),
        "layers": {"up": drawn(1, layers, width, 4 * width), "down": drawn(2, layers, 4 * width, width)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return step, ((params, zeros, zeros, jnp.zeros((), dtype)), drawn(3, batch, width))
