"""Padding next to convolutions and window sums becomes their own; values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.frontend.reference import check

RNG = np.random.default_rng(0)
# Whole numbers: sums are exact in any order.
X = jnp.asarray(RNG.integers(-3, 4, (1, 12, 10, 2)), jnp.float32)
W = jnp.asarray(RNG.integers(-3, 4, (3, 3, 2, 2)), jnp.float32)


def conv(x: jax.Array, w: jax.Array, stride: Any = 1, padding: Any = ((0, 0), (0, 0)), **options: Any) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, np.broadcast_to(stride, 2).tolist(), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def padded(x: jax.Array, low: int = 1, high: int = 1, between: int = 0) -> jax.Array:
    side = (low, high, between)
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), side, side, (0, 0, 0)))


def mean_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def max_pool(x: jax.Array) -> jax.Array:
    padding = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    return lax.reduce_window(padding, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


FOLDED: dict[str, Callable[..., jax.Array]] = {
    "pad": lambda x, w: conv(padded(x), w),
    "pad by numpy": lambda x, w: conv(jnp.pad(x, ((0, 0), (2, 1), (0, 3), (0, 0))), w, 2),
    "spread out": lambda x, w: conv(padded(x, 2, 1, 1), w),
    "of a spread one": lambda x, w: conv(padded(x, 2, 1), w, lhs_dilation=(2, 3)),
    "both spread": lambda x, w: conv(padded(x, 1, 2, 1), w, lhs_dilation=(2, 2)),
    "cut off before": lambda x, w: conv(padded(x, -2, 1), w, lhs_dilation=(2, 1)),
    "crop": lambda x, w: conv(x, w, 1, "SAME")[:, 2:-1, 1:],
    "crop with strides": lambda x, w: conv(x, w, 2, "SAME")[:, 1:-1],
    "every other": lambda x, w: conv(x, w, 1, "SAME")[:, 1:-1:2],
    "every third of a stride of two": lambda x, w: conv(x, w, (2, 1), "SAME")[:, 1:6:3],
    "two of both": lambda x, w: conv(conv(padded(x, 2, 2), w)[:, 1:-1, 1:-1], w, 1, "SAME"),
    "sums": lambda x, w: mean_pool(x * w.sum()),
    "largest": lambda x, w: max_pool(x) * w.sum(),
}
KEPT: dict[str, Callable[..., jax.Array]] = {
    "other numbers": lambda x, w: conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=2.0), w),
    "examples": lambda x, w: conv(jnp.pad(x, ((1, 1), (0, 0), (0, 0), (0, 0))), w),
    "zeros under the largest": lambda x, w: lax.reduce_window(
        padded(x * w.sum()), -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID"
    ),
    "features": lambda x, w: conv(x, w, 1, "SAME")[..., 1:],
    "read twice": lambda x, w: (lambda y: y[:, 1:-1] * y[:, 2:])(conv(x, w, 1, "SAME")),
}


def both(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda x, w: jax.value_and_grad(lambda x, w: (fn(x, w) ** 2).sum(), (0, 1))(x, w)


@pytest.mark.parametrize("name", FOLDED)
def test_padding_is_part_of_the_operator(name: str) -> None:
    for fn in (FOLDED[name], both(FOLDED[name])):
        graph = check(fn, X, W).graph
        kept = {op.primitive for op in graph.operators} & {"pad", "slice"}
        # What is selected in windows over padding of the user's own stays, and zeros around a gradient.
        assert not kept or (name in ("largest", "cut off before") and fn is not FOLDED[name])


@pytest.mark.parametrize("name", KEPT)
def test_other_padding_stays(name: str) -> None:
    graph = check(KEPT[name], X, W).graph
    assert {op.primitive for op in graph.operators} & {"pad", "slice"}
