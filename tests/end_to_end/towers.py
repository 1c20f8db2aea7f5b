"""Train steps with independent branches, drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Towers:
    """A step with towers of products side by side.

    Args:
        depths: products of each tower.
        width: of all layers.
        trunk: products before the towers; without any each tower has an input of its own.
        join: "mean" of the squared sum, "concatenate" and project, "contrast" of the first two over the batch, or
            "apart": losses that are added up.
        clip: whether gradients are clipped by their global norm.
        tied: whether all towers begin with the same matrix.
        momentum: whether the optimizer has state.
        batch: examples.
    """

    depths: tuple[int, ...]
    width: int = 8
    trunk: int = 0
    join: str = "mean"
    clip: bool = False
    tied: bool = False
    momentum: bool = False
    batch: int = 8

    def build(self, dtype: Any = jnp.float64) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The step and its arguments."""
        rng = np.random.default_rng(len(self.depths) + 7 * self.width)

        def matrix() -> jax.Array:
            return jnp.asarray(rng.normal(size=(self.width, self.width)) / self.width**0.5, dtype)

        names = [f"tower{n}" for n in range(len(self.depths))]
        params: dict[str, Any] = {
            name: [matrix() for _ in range(d)] for name, d in zip(names, self.depths, strict=True)
        }
        params["trunk"] = [matrix() for _ in range(self.trunk)]
        if self.join == "concatenate":
            params["head"] = jnp.asarray(rng.normal(size=(len(names) * self.width, 1)), dtype)
        if self.tied:
            params["tied"] = matrix()
        inputs = ["x"] if self.trunk else names
        batch = {n: jnp.asarray(rng.normal(size=(self.batch, self.width)), dtype) for n in inputs}
        state = (params, jax.tree.map(jnp.zeros_like, params)) if self.momentum else (params,)
        return self.step, (state, batch)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Of a batch."""
        names = [f"tower{n}" for n in range(len(self.depths))]
        shared = batch.get("x")
        for w in params["trunk"]:
            shared = jnp.tanh(shared @ w)
        ends = []
        for name in names:
            x = shared if self.trunk else batch[name]
            x = jnp.tanh(x @ params["tied"]) if self.tied else x
            for w in params[name]:
                x = jnp.tanh(x @ w)
            ends.append(x)
        if self.join == "concatenate":
            return ((jnp.concatenate(ends, axis=1) @ params["head"]) ** 2).mean()
        if self.join == "contrast":
            scores = ends[0] @ ends[1].T + sum(e.sum() for e in ends[2:])
            return -jnp.diagonal(jax.nn.log_softmax(scores)).mean()
        if self.join == "apart":
            return sum((e**2).mean() for e in ends)
        return (sum(ends) ** 2).mean()

    def step(self, state: Any, batch: Any) -> Any:
        """A step of gradient descent."""
        params, *moments = state
        loss, gradients = jax.value_and_grad(self.loss)(params, batch)
        if self.clip:
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
            gradients = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradients)
        for held in moments:
            gradients = jax.tree.map(lambda m, g: 0.9 * m + g, held, gradients)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return (new, *([gradients] * len(moments))), {"loss": loss}


def drawn(number: int) -> Towers:
    """The ``number``-th step; equal for equal numbers."""
    rng = np.random.default_rng((53, number))
    count = int(rng.integers(2, 4))
    return Towers(
        tuple(int(n) for n in rng.integers(1, 5, count)),
        trunk=int(rng.choice([0, 0, 1, 2])),
        join=str(rng.choice(["mean", "concatenate", "contrast", "apart"])),
        clip=bool(rng.integers(0, 2)),
        tied=bool(rng.random() < 0.3),
        momentum=bool(rng.integers(0, 2)),
    )
