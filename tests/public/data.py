"""Small batches of numbers, the same on every run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0) -> Any:
    """Normal float32 numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def integers(high: int, *shape: int, seed: int = 0) -> Any:
    """int32 numbers in [0, high)."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def gradient_step(loss: Any, optimizer: Any, apply_updates: Any) -> Any:
    """The step that most tutorials have: ``((params, opt_state), *batch) -> ((params, opt_state), loss)``.

    Args:
        loss: function of ``(params, *batch)``.
        optimizer: an optax optimizer.
        apply_updates: `optax.apply_updates`, or what a package has for it.
    """

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (apply_updates(params, updates), opt_state), value

    return step
