"""VGG16 (Simonyan and Zisserman, 2014) with plain gradient descent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

#: Channels of the convolutions between two poolings.
VGG16 = (64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)


def build(*, channels=None, size=224, batch=64, classes=1000, wide=4096, abstract=False):
    """The step and its arguments.

    Args:
        channels: of two convolutions each, with a pooling after; None takes those of VGG16.
        size: height and width of images.
        batch: number of them.
        classes: of images.
        wide: units of the two dense layers of VGG16; narrower ones take 16.
        abstract: whether arguments are shapes.
    """
    blocks = VGG16 if channels is None else tuple((c, c) for c in channels)
    dense = (wide, wide) if channels is None else (16,)

    def forward(params, x):
        for block in params["blocks"]:
            for kernel, bias in block:
                y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = jax.nn.relu(y + bias)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        for n, (kernel, bias) in enumerate(params["dense"]):
            x = x @ kernel + bias
            x = jax.nn.relu(x) if n < len(dense) else x
        return x

    def step(params, images, labels):
        def loss(params):
            logits = jax.nn.log_softmax(forward(params, images))
            return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    def arguments():
        keys = iter(jax.random.split(jax.random.key(0), 64))
        last, stages = 3, []
        for block in blocks:
            stages.append([])
            for c in block:
                kernel = jax.random.normal(next(keys), (3, 3, last, c)) * (2 / (9 * last)) ** 0.5
                stages[-1].append((kernel, jnp.zeros(c)))
                last = c
        units, layers = last * (size // 2 ** len(blocks)) ** 2, []
        for c in (*dense, classes):
            layers.append((jax.random.normal(next(keys), (units, c)) * (2 / units) ** 0.5, jnp.zeros(c)))
            units = c
        images = jax.random.normal(next(keys), (batch, size, size, 3))
        labels = jax.random.randint(next(keys), (batch,), 0, classes)
        return {"blocks": stages, "dense": layers}, images, labels

    return step, jax.eval_shape(arguments) if abstract else arguments()
