"""A state and a step as users of Flax and optax have them, without autopar."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax.training import train_state

STEPS = 2


def state() -> Any:
    params = {"w": jax.numpy.linspace(-1.0, 1.0, 48 * 48).reshape(48, 48), "b": jax.numpy.zeros(48)}
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def step(state: Any, x: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return ((x @ p["w"] + p["b"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch(rows: int) -> Any:
    return np.random.default_rng(1).normal(size=(rows, 48))
