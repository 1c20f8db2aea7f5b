"""Small builders of model families that no example has, as train steps on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

Built = tuple[Callable[..., Any], tuple[Any, Any]]
Shapes = Mapping[str, tuple[int, ...]]


def by_adam(loss: Callable[[Any, Any], Any], weights: Shapes, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Built:
    """A train step of Adam on a loss, with its state and batch as shapes."""
    optimizer = optax.adam(1e-3)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}

    def step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, ((params, jax.eval_shape(optimizer.init, params)), dict(batch))


def _attention(x: jax.Array, memory: jax.Array, qkv: jax.Array, out: jax.Array, heads: int) -> jax.Array:
    """Attention of ``x`` [batch, seq, width] on ``memory``."""
    batch, seq, width = x.shape
    q, k, v = (
        (source @ w).reshape(batch, -1, heads, width // heads)
        for source, w in zip((x, memory, memory), jnp.split(qkv, 3, axis=1), strict=True)
    )
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, width) @ out


def vit(batch: int, layers: int = 4, width: int = 512, patches: int = 64) -> Built:
    """A vision transformer on patches of 768 numbers."""
    weights: dict[str, tuple[int, ...]] = {"embed": (768, width), "head": (width, 1000)}
    for i in range(layers):
        weights |= {f"qkv{i}": (width, 3 * width), f"out{i}": (width, width)}
        weights |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}

    def loss(p: Any, b: Any) -> Any:
        x = b["patches"] @ p["embed"]
        for i in range(layers):
            x = x + _attention(x, x, p[f"qkv{i}"], p[f"out{i}"], 8)
            x = x + jax.nn.gelu(x @ p[f"up{i}"]) @ p[f"down{i}"]
        logits = x.mean(axis=1) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, b["labels"]).mean()

    shapes = {"patches": jax.ShapeDtypeStruct((batch, patches, 768), jnp.float32)}
    return by_adam(loss, weights, {**shapes, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)})


def translation(batch: int, layers: int = 2, width: int = 512, seq: int = 64, vocab: int = 8192) -> Built:
    """An encoder and a decoder that reads it, as T5."""
    weights: dict[str, tuple[int, ...]] = {"embed": (vocab, width)}
    for side in ("encoder", "decoder", "cross"):
        for i in range(layers):
            weights |= {f"{side}.qkv{i}": (width, 3 * width), f"{side}.out{i}": (width, width)}
            weights |= {f"{side}.up{i}": (width, 4 * width), f"{side}.down{i}": (4 * width, width)}

    def block(p: Any, side: str, i: int, x: jax.Array, memory: jax.Array) -> Any:
        x = x + _attention(x, memory, p[f"{side}.qkv{i}"], p[f"{side}.out{i}"], 8)
        return x + jax.nn.relu(x @ p[f"{side}.up{i}"]) @ p[f"{side}.down{i}"]

    def loss(p: Any, b: Any) -> Any:
        x, y = p["embed"][b["source"]], p["embed"][b["target"]]
        for i in range(layers):
            x = block(p, "encoder", i, x, x)
        for i in range(layers):
            y = block(p, "decoder", i, y, y)
            y = block(p, "cross", i, y, x)
        return optax.softmax_cross_entropy_with_integer_labels(y @ p["embed"].T, b["target"]).mean()

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return by_adam(loss, weights, {"source": tokens, "target": tokens})


def ranking(batch: int, tables: int = 8, rows: int = 65536, width: int = 64) -> Built:
    """Embedding tables, products of all pairs and a perceptron, as DLRM."""
    features = tables * (tables - 1) // 2 + 64
    weights: dict[str, tuple[int, ...]] = {f"table{i}": (rows, width) for i in range(tables)}
    weights |= {"dense": (64, 64), "top": (features, 512), "last": (512, 1)}

    def loss(p: Any, b: Any) -> Any:
        looked = jnp.stack([p[f"table{i}"][b["ids"][:, i]] for i in range(tables)], axis=1)
        pairs = jnp.einsum("bid,bjd->bij", looked, looked)[:, *jnp.triu_indices(tables, 1)]
        x = jnp.concatenate([pairs, jax.nn.relu(b["dense"] @ p["dense"])], axis=1)
        logits = (jax.nn.relu(x @ p["top"]) @ p["last"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, b["clicks"]).mean()

    shapes = {"ids": jax.ShapeDtypeStruct((batch, tables), jnp.int32)}
    shapes |= {"dense": jax.ShapeDtypeStruct((batch, 64), jnp.float32)}
    return by_adam(loss, weights, {**shapes, "clicks": jax.ShapeDtypeStruct((batch,), jnp.float32)})


def recurrent(batch: int, layers: int = 4, width: int = 512, seq: int = 64) -> Built:
    """Gated linear recurrences along the sequence, in a scan over time, as Mamba's."""
    weights: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        weights |= {f"gate{i}": (width, width), f"in{i}": (width, width), f"out{i}": (width, width)}

    def loss(p: Any, b: Any) -> Any:
        x = b["x"]
        for i in range(layers):
            gate, value = jax.nn.sigmoid(x @ p[f"gate{i}"]), x @ p[f"in{i}"]

            def one(carry: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                carry = at[0] * carry + (1 - at[0]) * at[1]
                return carry, carry

            swapped = (gate.swapaxes(0, 1), value.swapaxes(0, 1))
            _, states = jax.lax.scan(one, jnp.zeros_like(x[:, 0]), swapped)
            x = x + states.swapaxes(0, 1) @ p[f"out{i}"]
        return (x * x).mean()

    return by_adam(loss, weights, {"x": jax.ShapeDtypeStruct((batch, seq, width), jnp.float32)})


def unet(batch: int, width: int = 32, size: int = 32) -> Built:
    """Convolutions down and up again with skips."""
    weights = {"first": (3, 3, 3, width), "down": (3, 3, width, 2 * width), "deep": (3, 3, 2 * width, 2 * width)}
    weights |= {"up": (3, 3, 2 * width, width), "last": (3, 3, 2 * width, 3)}

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(p: Any, b: Any) -> Any:
        whole = jax.nn.relu(conv(b["image"], p["first"]))
        half = jax.nn.relu(conv(whole, p["down"], 2))
        half = jax.nn.relu(conv(half, p["deep"]))
        up = conv(jnp.repeat(jnp.repeat(half, 2, axis=1), 2, axis=2), p["up"])
        out = conv(jnp.concatenate([up, whole], axis=-1), p["last"])
        return ((out - b["image"]) ** 2).mean()

    return by_adam(loss, weights, {"image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)})


#: By name.
FAMILIES: Mapping[str, Callable[..., Built]] = MappingProxyType(
    {"vit": vit, "translation": translation, "ranking": ranking, "recurrent": recurrent, "unet": unet}
)
