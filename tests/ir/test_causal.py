"""Which attention is causal: no token sees a later one, whatever the mask looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.blockwise import AttentionSpec, blockwise
from tests.search.problems import f32, graph_of

TOKENS = 16


def by_mask(mask: Callable[..., Any], fill: float = -1e9, scale: float = 1.0) -> Callable[..., Any]:
    """Attention whose scores are filled where ``mask(row, key, ids)`` does not hold."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        at = jnp.arange(q.shape[1])
        scores = jnp.where(mask(at[:, None], at[None], ids), jnp.einsum("bqhd,bkhd->bhqk", q, k), fill) * scale
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return attend


def by_sum(fill: float, sign: float = 1.0) -> Callable[..., Any]:
    """Attention with a mask of numbers, 0 and ``fill``, that is added to its scores."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        mask = (1.0 - jnp.tri(q.shape[1], dtype=q.dtype)) * (sign * fill)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + mask), v)

    return attend


def fused(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def causal(fn: Callable[..., Any]) -> bool:
    """Whether the one core of a function is found to be causal."""
    graph = blockwise(graph_of(fn, *[f32(2, TOKENS, 2, 8)] * 3, jax.ShapeDtypeStruct((TOKENS,), jnp.int32)), 1).graph
    (core,) = (op for op in graph.operators if op.primitive == "attention")
    return AttentionSpec.of(core).causal


CAUSAL = {
    "row >= key": by_mask(lambda r, k, ids: r >= k),
    "key <= row": by_mask(lambda r, k, ids: k <= r),
    "not later": by_mask(lambda r, k, ids: ~(k > r)),
    "difference": by_mask(lambda r, k, ids: (r - k) >= 0),
    "doubled": by_mask(lambda r, k, ids: 2 * r + 3 >= 2 * k + 2),
    "window": by_mask(lambda r, k, ids: (r >= k) & (r - k < 4)),
    "never, where data say more": by_mask(lambda r, k, ids: (r >= k) & (ids[:, None] == ids[None]), -jnp.inf),
    "scaled after": by_mask(lambda r, k, ids: r >= k, -1e9, 2.0),
    "sum": by_sum(-1e9),
    "negative sum": by_sum(1e9, -1.0),
    "fused": fused,
}
NOT_CAUSAL = {
    "no mask": by_mask(lambda r, k, ids: r >= 0),
    "one later": by_mask(lambda r, k, ids: r + 1 >= k),
    "earlier alone": by_mask(lambda r, k, ids: r > k),  # the first row has no key, and weighs all alike
    "later": by_mask(lambda r, k, ids: k >= r),
    "data may leave no key": by_mask(lambda r, k, ids: (r >= k) & (ids[:, None] == ids[None])),
    "data may let more through": by_mask(lambda r, k, ids: (r >= k) | (ids[None] > 0)),
    "a fill that is a score": by_mask(lambda r, k, ids: r >= k, -5.0),
    "a fill made small": by_mask(lambda r, k, ids: r >= k, -1e9, 1e-9),
    "a sum that is a score": by_sum(-5.0),
    "a positive sum": by_sum(1e9),
    "another position": by_mask(lambda r, k, ids: (r - k).astype(bool)),
    "products of positions": by_mask(lambda r, k, ids: r * k >= k),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_later_keys_are_left_out(name: str) -> None:
    assert causal(CAUSAL[name])


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_some_row_may_see_a_later_key(name: str) -> None:
    assert not causal(NOT_CAUSAL[name])


def test_tokens_that_ask_are_fewer_than_keys() -> None:
    """The last of many tokens: positions do not mean the same, and halves would not be equal."""

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        at = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None]
        return jax.nn.softmax(jnp.where(at[0] >= at[1], q @ k.T, -1e9)) @ k

    graph = blockwise(graph_of(attend, f32(8, 4), f32(16, 4)), 1).graph
    assert [AttentionSpec.of(op).causal for op in graph.operators if op.primitive == "attention"] == [False]
