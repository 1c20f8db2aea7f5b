"""Small models and the interpreter on one device that pipelines without a flush are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.schedule.without_flush.schedules import VersionMap
from examples import gpt, wide_resnet


def perceptron() -> tuple[Any, Any, Any, Any]:
    """Four layers; SGD with momentum."""
    keys = jax.random.split(jax.random.key(1), 5)
    params = {f"layer{n}": jax.random.normal(k, (8, 8), jnp.float64) / 3 for n, k in enumerate(keys[:4])}

    def loss(params, batch):
        x, y = batch
        for n in range(4):
            x = jnp.tanh(x @ params[f"layer{n}"])
        return jnp.mean((x - y) ** 2)

    def batch(key, size):
        return tuple(jax.random.normal(k, (size, 8), jnp.float64) for k in jax.random.split(key))

    return params, loss, optax.sgd(0.3, momentum=0.9), batch


def residual() -> tuple[Any, Any, Any, Any]:
    """Residual layers whose first value the last one reads too; AdamW with a schedule, so with counts."""
    keys = jax.random.split(jax.random.key(2), 8)
    params = [
        {"w": jax.random.normal(k, (6, 6), jnp.float64) / 4, "b": jnp.full(6, 0.1, jnp.float64)} for k in keys[:5]
    ]

    def loss(params, batch):
        first = x = jnp.sin(batch["x"] @ params[0]["w"] + params[0]["b"])
        for p in params[1:]:
            x = x + jax.nn.gelu(x @ p["w"] + p["b"])
        return jnp.mean(jnp.sum((x + first - batch["y"]) ** 2, axis=-1))

    def batch(key, size):
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (size, 6), jnp.float64), "y": jax.random.normal(b, (size, 6), jnp.float64)}

    rate = optax.exponential_decay(0.02, 3, 0.7)
    return params, loss, optax.adamw(rate, weight_decay=0.1), batch


def attention() -> tuple[Any, Any, Any, Any]:
    """Two causal attention blocks between an embedding and a head of their own; RMSprop."""
    keys = iter(jax.random.split(jax.random.key(3), 20))

    def matrix(*shape):
        return jax.random.normal(next(keys), shape, jnp.float64) / np.sqrt(shape[0])

    blocks = [{"qkv": matrix(8, 24), "out": matrix(8, 8), "up": matrix(8, 16), "down": matrix(16, 8)} for _ in "ab"]
    params = {"embed": matrix(11, 8), "blocks": blocks, "head": matrix(8, 11)}

    def block(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        scores = jnp.einsum("bid,bjd->bij", q, k) / np.sqrt(8)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        x = x + jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ v @ p["out"]
        return x + jax.nn.silu(x @ p["up"]) @ p["down"]

    def loss(params, batch):
        x = params["embed"][batch[:, :-1]]
        for p in params["blocks"]:
            x = block(p, x)
        logp = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logp, batch[:, 1:, None], axis=-1))

    def batch(key, size):
        return jax.random.randint(key, (size, 6), 0, 11)

    return params, loss, optax.rmsprop(0.01), batch


def mlp() -> tuple[Any, Any, Any, Any]:
    """Layers with biases; Adam."""
    keys = jax.random.split(jax.random.key(4), 5)
    params = [
        {"w": jax.random.normal(k, (8, 8), jnp.float64) / 2, "b": jnp.full(8, 0.1, jnp.float64)} for k in keys[:5]
    ]

    def loss(params, batch):
        x, y = batch
        for n, p in enumerate(params):
            x = x @ p["w"] + p["b"]
            x = jax.nn.relu(x) if n < len(params) - 1 else x
        return jnp.mean((x - y) ** 2)

    def batch(key, size):
        return tuple(jax.random.normal(k, (size, 8), jnp.float64) for k in jax.random.split(key))

    return params, loss, optax.adam(0.01), batch


def small_gpt() -> tuple[Any, Any, Any, Any]:
    """The example's GPT with an output matrix of its own; AdamW."""
    config = gpt.Config(layers=2, hidden=16, heads=2, vocab=24, seq=6, dtype="float64", tied=False, clip=None)
    init, apply = gpt.make_model(config)

    def loss(params, batch):
        logp = jax.nn.log_softmax(apply(params, batch["tokens"]))
        return -jnp.mean(jnp.take_along_axis(logp, batch["labels"][..., None], axis=-1))

    def batch(key, size):
        text = jax.random.randint(key, (size, config.seq + 1), 0, config.vocab)
        return {"tokens": text[:, :-1], "labels": text[:, 1:]}

    return init(jax.random.key(5)), loss, optax.adamw(0.01, weight_decay=0.01), batch


def small_resnet() -> tuple[Any, Any, Any, Any]:
    """The example's Wide-ResNet with group norms; SGD with momentum."""
    config = wide_resnet.Config(stages=(1, 1), base_channels=4, classes=5, image=8, groups=2, dtype="float64")

    def loss(params, batch):
        logp = jax.nn.log_softmax(wide_resnet.apply(config, params, batch["images"]))
        return -jnp.mean(jnp.take_along_axis(logp, batch["labels"][:, None], axis=-1))

    def batch(key, size):
        a, b = jax.random.split(key)
        images = jax.random.normal(a, (size, config.image, config.image, 3), jnp.float64)
        return {"images": images, "labels": jax.random.randint(b, (size,), 0, config.classes)}

    return wide_resnet.init_params(config), loss, optax.sgd(0.05, momentum=0.9), batch


MODELS = {
    "perceptron": perceptron,
    "residual": residual,
    "attention": attention,
    "mlp": mlp,
    "gpt": small_gpt,
    "wide_resnet": small_resnet,
}


def step_of(loss: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """A plain train step."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return step


def replay(
    loss: Callable[..., Any], tx: Any, state: Any, batches: list[Any], versions: VersionMap, m: int, stages: Any
) -> tuple[list[Any], list[Any]]:
    """States after each update and losses of each microbatch, on one device.

    Args:
        loss: of parameters and a batch.
        tx: optimizer.
        state: the first state.
        batches: one a call.
        versions: which version a stage reads for a microbatch.
        m: microbatches a call.
        stages: like the parameters, the stage of each.
    """

    @jax.jit
    def gradient(params, piece):
        return jax.value_and_grad(loss)(params, piece)

    @jax.jit
    def update(state, grads):
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    states, losses, unauthenticated = [state], [], []
    for call, whole in enumerate(batches):
        for i in range(m):
            k = call * m + i
            piece = jax.tree.map(lambda x, i=i: x[i * (len(x) // m) : (i + 1) * (len(x) // m)], whole)
            read = jax.tree.map(lambda s, *v, k=k: v[versions.reads(s, k)], stages, *(s["params"] for s in states))
            value, grads = gradient(read, piece)
            losses.append(value)
            unauthenticated.append(grads)
            if len(unauthenticated) == versions.update_every:
                mean = jax.tree.map(lambda *g: sum(g) / len(g), *unauthenticated)
                states.append(update(states[-1], mean))
                unauthenticated = []
    return states, losses
