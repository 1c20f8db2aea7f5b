"""What the text of a generated program calls, and the arguments that it is called with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Relative size of the noise that tells an unstable program from a wrong value.
NOISE = 1e-13


def argument(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    """An input: ``float`` of unit variance, ``int`` from 0 to 7, ``bool``, ``key`` (typed) or ``rawkey``."""
    rng = np.random.default_rng((seed, *shape))
    match kind:
        case "float":
            return jnp.asarray(rng.standard_normal(shape), jnp.float64)
        case "int":
            return jnp.asarray(rng.integers(0, 8, shape), jnp.int32)
        case "bool":
            return jnp.asarray(rng.random(shape) < 0.5)
        case "key":
            return jax.random.key(seed) if shape == () else jax.random.split(jax.random.key(seed), shape)
        case "rawkey":
            return jax.random.key_data(jax.random.key(seed))
    raise ValueError(kind)


def steps(x: Any) -> Any:
    """Whole numbers from floats, with the jumps where no value of a test lies: rounding cannot change them."""
    return jnp.round(x * 8 + 0.3137)


def is_floating(x: Any) -> bool:
    """Whether an array has floats."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def total(outputs: Any) -> Any:
    """A scalar that depends on every element of every float."""
    parts = [jnp.mean(jnp.sin(x)) for x in jax.tree.leaves(outputs) if is_floating(x) and x.size]
    return sum(parts, jnp.zeros(()))


def sgd(params: Any, grads: Any) -> Any:
    """A step down the gradient."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def adam(params: Any, grads: Any, moments: Any) -> tuple[Any, Any]:
    """A step of Adam with clipping by global norm; ``moments`` are (first, second)."""
    norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(grads)), jnp.zeros(())))
    grads = jax.tree.map(lambda g: g / (1 + norm), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v * v + 0.01 * g * g, moments[1], grads)
    new = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-2), params, first, second)
    return new, (first, second)


def noisy(x: Any) -> Any:
    """Floats changed in their last digits, each element by itself."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    noise = np.random.default_rng(x.size).choice([-1.0, 1.0], x.shape)
    return x * (1 + NOISE * noise)
