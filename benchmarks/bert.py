"""A train step of BERT: an encoder with masked language modelling and AdamW (Devlin et al., 2019), in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def build(
    preset: str = "base",
    *,
    abstract: bool = True,
    layers: int = 4,
    hidden: int = 512,
    heads: int = 8,
    vocab: int = 8192,
    seq: int = 128,
    batch: int = 64,
) -> tuple[Callable[[Tree, Tree], tuple[Tree, jax.Array]], tuple[Tree, Tree]]:
    """A step ``(state, batch) -> (state, loss)`` and the shapes of its arguments.

    Args:
        preset: there is one.
        abstract: arrays are not made.
        layers, hidden, heads, vocab, seq, batch: sizes; a head has ``hidden / heads`` features.
    """
    assert preset == "base" and abstract
    optimizer = optax.adamw(1e-4)

    def step(state: Tree, examples: Tree) -> tuple[Tree, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(_loss)(params, examples, heads)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = _parameters(layers, hidden, vocab, seq)
    tokens, weights = (jax.ShapeDtypeStruct((batch, seq), dtype) for dtype in ("int32", "float32"))
    examples = {"ids": tokens, "types": tokens, "labels": tokens, "mask": weights, "weights": weights}
    return step, ((params, jax.eval_shape(optimizer.init, params)), examples)


def _parameters(layers: int, hidden: int, vocab: int, seq: int) -> Tree:
    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def linear(n: int, m: int) -> Tree:
        return {"w": f32(n, m), "b": f32(m)}

    norm = {"scale": f32(hidden), "shift": f32(hidden)}
    block = {
        "qkv": linear(hidden, 3 * hidden),
        "out": linear(hidden, hidden),
        "up": linear(hidden, 4 * hidden),
        "down": linear(4 * hidden, hidden),
        "attended": norm,
        "fed": norm,
    }
    tables = {"tokens": f32(vocab, hidden), "positions": f32(seq, hidden), "types": f32(2, hidden), "norm": norm}
    return {**tables, "blocks": [block] * layers, "head": linear(hidden, hidden), "heads": norm, "bias": f32(vocab)}


def _normed(x: jax.Array, p: Tree) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    normed: jax.Array = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-12)
    return normed * p["scale"] + p["shift"]


def _linear(x: jax.Array, p: Tree) -> jax.Array:
    return x @ p["w"] + p["b"]


def _attention(x: jax.Array, p: Tree, mask: jax.Array, heads: int) -> jax.Array:
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    q, k, v = (t.reshape(split).swapaxes(1, 2) for t in jnp.split(_linear(x, p["qkv"]), 3, -1))
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / split[-1] ** 0.5 + mask, -1)
    return _linear((scores @ v).swapaxes(1, 2).reshape(x.shape), p["out"])


def _loss(p: Tree, b: Tree, heads: int) -> jax.Array:
    x = _normed(p["tokens"][b["ids"]] + p["positions"] + p["types"][b["types"]], p["norm"])
    mask = (b["mask"][:, None, None, :] - 1.0) * 1e9
    for block in p["blocks"]:
        x = _normed(x + _attention(x, block, mask, heads), block["attended"])
        x = _normed(x + _linear(jax.nn.gelu(_linear(x, block["up"])), block["down"]), block["fed"])
    hidden = _normed(jax.nn.gelu(_linear(x, p["head"])), p["heads"])
    predicted = jax.nn.log_softmax(hidden @ p["tokens"].T + p["bias"])
    of_labels = jnp.take_along_axis(predicted, b["labels"][..., None], -1)[..., 0]
    loss: jax.Array = -(of_labels * b["weights"]).sum() / b["weights"].sum()
    return loss
