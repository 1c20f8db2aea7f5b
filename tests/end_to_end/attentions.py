"""Attention as people write it: functions of queries, keys, values ``[batch, tokens, heads, dims]`` and segment ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from examples._common import causal_attention


def example(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return causal_attention(q, k, v)


def by_hand(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Without `jax.nn`: the largest score has a gradient, which comes to nothing."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3.0
    tokens = jnp.arange(q.shape[1])
    scores = jnp.where(tokens[:, None] >= tokens[None], scores, -1e9)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def capped(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """A cap on the scores, segments and recomputation."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = 5.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5.0)
        same = ids[:, :, None] == ids[:, None, :]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(same[:, None], scores, -1e30)), v)

    return jax.checkpoint(attend)(q, k, v)


def biased(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """A bias that grows with the distance, keys in the rows of the scores, queries scaled before."""
    tokens = jnp.arange(q.shape[1], dtype=q.dtype)
    slopes = jnp.arange(1, q.shape[2] + 1, dtype=q.dtype)[:, None, None]
    bias = -slopes * jnp.abs(tokens[:, None] - tokens[None])
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q * 0.3) + bias
    return jnp.einsum("bhkq,bkhd->bhqd", jax.nn.softmax(scores, axis=2), v).transpose(0, 2, 1, 3)


def one_head(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T, axis=-1)
    return weights @ v[0, :, 0]


def whole(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Every token sees every other one."""
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Heads share keys."""
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0])
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v[:, :, 0])


def windowed(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """The last five tokens of the same segment, and a bias by distance."""
    at = jnp.arange(q.shape[1])
    distance = at[:, None] - at[None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) - 0.1 * distance.astype(q.dtype)
    seen = (distance >= 0) & (distance < 5) & ((ids[:, :, None] == ids[:, None]) | (distance == 0))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v)


#: More forms, for tests of their own.
MORE: Mapping[str, Callable[..., jax.Array]] = MappingProxyType({f.__name__: f for f in (whole, grouped, windowed)})
#: Names of those that are causal.
CAUSAL = ("example", "by_hand", "grouped", "windowed")
FORMS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {f.__name__: f for f in (example, by_hand, capped, biased, one_head)}
)


def train_step(form: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients of queries, keys and values under a loss that is not linear."""

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
        return jax.value_and_grad(lambda q, k, v: jnp.sum(jnp.sin(form(q, k, v, ids))), (0, 1, 2))(q, k, v)

    return gradients
