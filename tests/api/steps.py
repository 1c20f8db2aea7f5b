"""Small train steps and containers like those that libraries define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.end_to_end.clusters import toy

CLUSTER = toy()


def params(seed: int = 0, hidden: int = 16) -> dict[str, jax.Array]:
    """``{"w": [hidden, 8], "b": [8]}``."""
    w = np.random.default_rng(seed).standard_normal((hidden, 8))
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(8)}


def batch(size: int = 16, hidden: int = 16, seed: int = 1) -> dict[str, np.ndarray]:
    """``{"x": [size, hidden], "y": [size, 8]}`` in numpy."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((size, hidden)).astype(np.float32),
        "y": rng.standard_normal((size, 8)).astype(np.float32),
    }


def loss_fn(p: dict[str, Any], x: Any, y: Any) -> Any:
    """Mean squared error of a linear model."""
    return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)


def sgd(p: Any, data: dict[str, Any], rate: Any = 0.1) -> tuple[Any, Any]:
    """``(new parameters, loss)``."""
    loss, grads = jax.value_and_grad(loss_fn)(p, data["x"], data["y"])
    return jax.tree.map(lambda a, g: a - rate * g, p, grads), loss


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class Module:
    """Like an Equinox module: every field is a leaf, functions and strings too."""

    w: Any
    activation: Any
    name: Any
    scale: Any
    nothing: Any = None

    def tree_flatten_with_keys(self):
        fields = ("w", "activation", "name", "scale", "nothing")
        return [(jax.tree_util.GetAttrKey(f), getattr(self, f)) for f in fields], None

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(*leaves)

    def __call__(self, x):
        return self.activation(x @ self.w) * self.scale


@jax.tree_util.register_pytree_with_keys_class
class Strict:
    """A container that refuses leaves without a shape, and carries its size in its structure."""

    def __init__(self, array: Any) -> None:
        assert hasattr(array, "shape") and hasattr(array, "dtype"), f"not an array: {array!r}"
        self.array = array
        self.size = array.shape[0]

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], self.size

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        made = cls(leaves[0])
        assert made.size == aux
        return made
