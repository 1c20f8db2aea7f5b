"""Small functions that together use most primitives of train steps, with sizes that split in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    rng = np.random.default_rng((seed, *shape))
    if np.issubdtype(dtype, np.integer):
        return jnp.asarray(rng.integers(0, 8, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _mlp(w: Any, v: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jax.nn.relu(x @ w) @ v) ** 2)


def _attention(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def _scan(ws: Any, x: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        c = jnp.tanh(c @ w)
        return c, c.sum(-1)

    c, ys = jax.lax.scan(jax.checkpoint(body), x, ws)
    return c.sum() + ys.var()


def _while(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: (c[1] < 3) & (c[0].sum() < 1e9), lambda c: (c[0] * 1.5, c[1] + 1), (x, 0))


def _cond(flag: Any, x: Any) -> Any:
    return jax.lax.cond(flag, lambda x: (x @ x.T, x.sum(0)), lambda x: (jnp.ones((x.shape[0],) * 2), x[0]), x)


def _accumulated(w: Any, x: Any) -> Any:
    def body(g: Any, part: Any) -> Any:
        return g + jax.grad(lambda w: jnp.mean((part @ w) ** 2))(w), None

    return w - 0.1 * jax.lax.scan(body, jnp.zeros_like(w), x.reshape(4, 4, -1))[0]


def _embedding(table: Any, ids: Any) -> Any:
    return jnp.mean(jnp.tanh(table[ids]) ** 2)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], axis=1))


def _conv(x: Any, w: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.gelu(y) ** 2)


def _depthwise(x: Any, w: Any) -> Any:
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
    )
    return jnp.mean(y**3)


def _pool(x: Any) -> Any:
    return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


def _dropout(key: Any, x: Any) -> Any:
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0).sum(1), jax.random.normal(jax.random.split(key, 4)[1], (8, 16))


def _layer_norm(x: Any, g: Any) -> Any:
    m = x.mean(-1, keepdims=True)
    return jnp.sum(jnp.sin((x - m) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g))


def _experts(x: Any, gate: Any, w: Any) -> Any:
    probs = jax.nn.softmax(x @ gate)
    top, index = jax.lax.top_k(probs, 2)
    mask = jax.nn.one_hot(index, 8) * top[..., None]
    place = jnp.cumsum(mask.sum(1), axis=0)
    mixed = jnp.einsum("te,td,edf->tf", mask.sum(1) * (place < 9), x, w)
    return jnp.mean(mixed**2)


def _adam(p: Any, m: Any, v: Any, g: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    g = m / (jnp.sqrt(v) + 1e-8)
    norm = jnp.sqrt(jnp.sum(g * g))
    return p - jnp.where(norm > 1, g / norm, g), m, v


def _mixed(x: Any, w: Any) -> Any:
    return jnp.mean((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (jax.value_and_grad(_mlp, argnums=(0, 1)), (_array(8, 16), _array(16, 8), _array(16, 8))),
    "uneven mlp": (jax.value_and_grad(_mlp, argnums=(0, 1)), (_array(6, 12), _array(12, 5), _array(10, 6))),
    "attention": (
        jax.grad(lambda *a: _attention(*a).sum(), argnums=(0, 1, 2)),
        (_array(4, 8, 4, 2), _array(4, 8, 4, 2, seed=1), _array(4, 8, 4, 2, seed=2)),
    ),
    "scan": (jax.value_and_grad(_scan, argnums=(0, 1)), (_array(3, 8, 8), _array(16, 8))),
    "while": (_while, (_array(8, 8),)),
    "cond": (_cond, (jnp.bool_(True), _array(8, 4))),
    "accumulated": (_accumulated, (_array(8, 8), _array(16, 8))),
    "embedding": (jax.value_and_grad(_embedding), (_array(16, 8), _array(8, 4, dtype=np.int32))),
    "cross entropy": (jax.value_and_grad(_cross_entropy), (_array(16, 8), _array(16, dtype=np.int32))),
    "conv": (jax.value_and_grad(_conv, argnums=(0, 1)), (_array(8, 8, 8, 4), _array(3, 3, 4, 8))),
    "depthwise": (jax.value_and_grad(_depthwise, argnums=(0, 1)), (_array(8, 4, 4, 8), _array(3, 3, 1, 8))),
    "pool": (jax.value_and_grad(_pool), (_array(8, 8, 8, 4),)),
    "dropout": (_dropout, (jax.random.key(3), _array(16, 8))),
    "layer norm": (jax.value_and_grad(_layer_norm, argnums=(0, 1)), (_array(8, 16), _array(16))),
    "experts": (jax.value_and_grad(_experts, argnums=(1, 2)), (_array(16, 8), _array(8, 8), _array(8, 8, 4))),
    "adam": (_adam, tuple(_array(16, 8, seed=i) ** 2 for i in range(4))),
    "mixed precision": (jax.value_and_grad(_mixed, argnums=1), (_array(16, 8), _array(8, 8))),
    "reshapes": (
        lambda x: (x.reshape(4, 2, 16).transpose(1, 0, 2).reshape(8, 16), x.reshape(-1), x.reshape(2, 4, 4, 4).sum(1)),
        (_array(8, 16),),
    ),
    "slices": (
        lambda x, i: (x[2:6], x[::2], x[:, ::-1], jax.lax.dynamic_slice(x, (i, 0), (4, 8)), x.at[1:3].set(0.0)),
        (_array(8, 8), jnp.int32(3)),
    ),
    "join": (
        lambda x, y: (jnp.concatenate([x, y]), jnp.stack([x, y], 1), jnp.pad(x, ((1, 3), (0, 0))), jnp.roll(x, 3, 0)),
        (_array(8, 4), _array(8, 4, seed=1)),
    ),
    "order": (
        lambda x: (jnp.sort(x, 1), jnp.argsort(x, 0), x.argmax(0), jnp.cumsum(x, 0), x.cumprod(1), x.max(), x.min(1)),
        (_array(8, 16),),
    ),
    "integers": (
        lambda x: (x // 3, x % 3, (x > 2).sum(), jnp.bitwise_xor(x, 5), (x == x.max()).any(0), (x > -1).all()),
        (_array(8, 8, dtype=np.int32),),
    ),
    "scatter": (
        lambda x, i, u: (x.at[i].add(u), x.at[i].max(u), jax.ops.segment_sum(u, i, 16)),
        (_array(16, 4), _array(8, dtype=np.int32), _array(8, 4, seed=2)),
    ),
    "linear algebra": (
        lambda x: (jnp.linalg.inv(x @ x.mT + jnp.eye(4)), jnp.linalg.norm(x), jnp.einsum("bij,bjk->ik", x, x)),
        (_array(8, 4, 4),),
    ),
    "complex": (lambda x: (jnp.fft.fft(x).real, jnp.abs(x + 1j * x)), (_array(8, 8),)),
    "second order": (jax.hessian(lambda w: jnp.sum(jnp.tanh(w) ** 3)), (_array(8),)),
    "vmap": (jax.vmap(lambda w, x: jnp.tanh(x @ w).sum(), in_axes=(0, None)), (_array(8, 4, 4), _array(16, 4))),
}
