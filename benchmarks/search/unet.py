"""A small U-Net's train step: convolutions down and up, with skips between (Ronneberger et al., MICCAI'15)."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp


def build(*, channels: int = 16, depth: int = 2, image: int = 32, batch: int = 16) -> tuple[Any, tuple[Any, Any]]:
    """The step and the shapes of its arguments.

    Args:
        channels: of the first level; each level has twice as many as the one above.
        depth: number of levels.
        image: height and width.
        batch: number of images.
    """
    widths = [channels * 2**k for k in range(depth + 1)]
    shapes: dict[str, tuple[int, ...]] = {"in": (3, 3, 3, widths[0])}
    for k, (above, below) in enumerate(itertools.pairwise(widths)):
        shapes[f"down{k}"] = (3, 3, above, below)
        shapes[f"up{k}"] = (3, 3, below + above, above)
    shapes["out"] = (1, 1, widths[0], 1)
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    data = {
        "image": jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32),
        "mask": jax.ShapeDtypeStruct((batch, image, image, 1), jnp.float32),
    }

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = jax.nn.relu(convolved(batch["image"], weights["in"]))
        skips = []
        for k in range(depth):
            skips.append(x)
            n, h, w, c = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))
            x = jax.nn.relu(convolved(x, weights[f"down{k}"]))
        for k in reversed(range(depth)):
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = jax.nn.relu(convolved(jnp.concatenate([x, skips[k]], axis=-1), weights[f"up{k}"]))
        return jnp.mean((convolved(x, weights["out"]) - batch["mask"]) ** 2)

    def train_step(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        value, grad = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grad), value

    return train_step, (state, data)
