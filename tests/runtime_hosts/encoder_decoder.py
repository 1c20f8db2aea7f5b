"""A small encoder-decoder: every decoder layer attends to the end of the encoder, which later stages read too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def build(
    preset: str = "tiny",
    *,
    layers: int = 2,
    hidden: int = 16,
    vocab: int = 32,
    seq: int = 6,
    batch: int = 16,
    dtype: str = "float64",
    tied: bool = True,
) -> tuple[Any, tuple[Any, Any]]:
    """The step and its arguments.

    Args:
        preset: as the examples have it.
        layers: of the encoder, and as many of the decoder.
        hidden: width.
        vocab: words.
        seq: words of a sentence.
        batch: sentences.
        dtype: of all numbers.
        tied: whether words of both sides and of the output are one matrix.
    """
    draw = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> Any:
        return jnp.asarray(draw.normal(size=(rows, columns)) / rows**0.5, dtype)

    def block(names: str) -> Any:
        attention = {n: {k: matrix(hidden, hidden) for k in "qkvo"} for n in names}
        return {**attention, "up": matrix(hidden, 2 * hidden), "down": matrix(2 * hidden, hidden)}

    params = {
        "words": matrix(vocab, hidden),
        "encoder": [block("s") for _ in range(layers)],
        "decoder": [block("sc") for _ in range(layers)],
    }
    if not tied:
        params |= {"target": matrix(vocab, hidden), "output": matrix(vocab, hidden)}
    text = {n: jnp.asarray(draw.integers(0, vocab, (batch, seq)), jnp.int32) for n in ("source", "target", "labels")}
    return step, ({"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, text)


def _attended(w: Any, x: Any, to: Any, *, causal: bool) -> Any:
    q, k, v = x @ w["q"], to @ w["k"], to @ w["v"]
    scores = q @ jnp.swapaxes(k, 1, 2) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), scores, -1e9)
    return x + jax.nn.softmax(scores) @ v @ w["o"]


def _widened(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss_of(params: Any, text: Any) -> Any:
    """Mean cross entropy; words of both sides and of the output are one matrix unless there are others."""
    x, y = params["words"][text["source"]], params.get("target", params["words"])[text["target"]]
    for w in params["encoder"]:
        x = _widened(w, _attended(w["s"], x, x, causal=False))
    for w in params["decoder"]:
        y = _widened(w, _attended(w["c"], _attended(w["s"], y, y, causal=True), x, causal=False))
    logits = y @ params.get("output", params["words"]).T
    picked = jnp.sum(jax.nn.one_hot(text["labels"], logits.shape[-1], dtype=logits.dtype) * logits, -1)
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def step(state: Any, text: Any) -> Any:
    """A step of gradient descent with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], text)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, {"loss": loss}
