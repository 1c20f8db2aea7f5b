"""More model families that no example has, small, as train steps of Adam on shapes alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.families import Built, Shapes, by_adam


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _heads(x: jax.Array, w: jax.Array, heads: int) -> jax.Array:
    """``x w`` as [batch, seq, heads, dims]."""
    y = x @ w
    return y.reshape(*y.shape[:2], heads, -1)


def _attend(p: Any, i: int, x: jax.Array, memory: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    q, k, v = (_heads(s, p[f"{n}{i}"], 8) for n, s in (("wq", x), ("wk", memory), ("wv", memory)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape[0], x.shape[1], -1) @ p[f"wo{i}"]


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _attention_weights(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{n}{i}": (width, width) for i in range(layers) for n in ("wq", "wk", "wv", "wo")}


def _perceptrons(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    up, down = (width, 4 * width), (4 * width, width)
    return {f"up{i}": up for i in range(layers)} | {f"down{i}": down for i in range(layers)}


def two_level_experts(batch: int = 64, seq: int = 64, width: int = 128, groups: int = 2, of_each: int = 4) -> Built:
    """Experts behind two gates: one of some groups, then one of the experts in it; slots of a capacity."""
    count, inner = groups * of_each, 4 * width
    weights: dict[str, tuple[int, ...]] = {"gate": (width, groups), "gates": (width, groups * of_each)}
    weights |= {"expertup": (count, width, inner), "expertdown": (count, inner, width), "head": (width, 256)}
    capacity = 2 * seq // count

    def loss(p: Any, b: Any) -> Any:
        x = b["x"]
        first = jax.nn.softmax(x @ p["gate"])
        second = jax.nn.softmax((x @ p["gates"]).reshape(*x.shape[:2], groups, of_each))
        group = jax.nn.one_hot(first.argmax(-1), groups)
        member = jax.nn.one_hot(jnp.einsum("bsg,bsge->bse", group, second).argmax(-1), of_each)
        chosen = jnp.einsum("bsg,bse->bsge", group, member).reshape(*x.shape[:2], count)
        weight = jnp.einsum("bsg,bsge,bsge->bs", first, second, chosen.reshape(*second.shape))
        slot = jax.nn.one_hot((jnp.cumsum(chosen, 1) * chosen).astype(jnp.int32) - 1, capacity)
        taken = jnp.einsum("bsec,bsm->ebcm", slot, x)
        out = jnp.einsum(
            "ebch,ehm->ebcm", jax.nn.relu(jnp.einsum("ebcm,emh->ebch", taken, p["expertup"])), p["expertdown"]
        )
        y = x + jnp.einsum("bsec,ebcm->bsm", slot, out) * weight[..., None]
        return (jax.nn.log_softmax(_norm(y) @ p["head"]) ** 2).mean()

    return by_adam(loss, weights, {"x": _f32(batch, seq, width)})


def masked_language(batch: int = 32, seq: int = 64, layers: int = 2, width: int = 256, vocab: int = 4096) -> Built:
    """An encoder that says which tokens were hidden, as BERT; its table is tied."""
    weights: dict[str, tuple[int, ...]] = {
        "embed": (vocab, width),
        "place": (seq, width),
        **_attention_weights(layers, width),
    }
    weights |= {f"up{i}": (width, 4 * width) for i in range(layers)} | {
        f"down{i}": (4 * width, width) for i in range(layers)
    }

    def loss(p: Any, b: Any) -> Any:
        x, seen = p["embed"][b["ids"]] + p["place"], (b["ids"] != 0)[:, None, None, :]
        for i in range(layers):
            x = _norm(x + _attend(p, i, x, x, seen))
            x = _norm(x + jax.nn.gelu(x @ p[f"up{i}"]) @ p[f"down{i}"])
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, b["labels"])
        return (losses * b["hidden"]).sum() / b["hidden"].sum()

    return by_adam(loss, weights, {"ids": _i32(batch, seq), "labels": _i32(batch, seq), "hidden": _f32(batch, seq)})


def selective(batch: int = 32, seq: int = 64, layers: int = 2, width: int = 128, states: int = 8) -> Built:
    """Selective state spaces with a convolution before, by an associative scan, as Mamba."""
    inner = 2 * width
    weights: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        weights |= {
            f"in{i}": (width, inner),
            f"gate{i}": (width, inner),
            f"conv{i}": (4, inner),
            f"rate{i}": (inner, inner),
        }
        weights |= {
            f"b{i}": (inner, states),
            f"c{i}": (inner, states),
            f"a{i}": (inner, states),
            f"out{i}": (inner, width),
        }

    def scanned(decay: jax.Array, new: jax.Array) -> jax.Array:
        def joined(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        made: jax.Array = jax.lax.associative_scan(joined, (decay, new), axis=1)[1]
        return made

    def loss(p: Any, b: Any) -> Any:
        x = b["x"]
        for i in range(layers):
            h = x @ p[f"in{i}"]
            padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
            h = jax.nn.silu(sum(padded[:, n : n + seq] * p[f"conv{i}"][n] for n in range(4)))
            rate = jax.nn.softplus(h @ p[f"rate{i}"])[..., None]
            state = scanned(jnp.exp(-rate * jnp.exp(p[f"a{i}"])), rate * (h @ p[f"b{i}"])[:, :, None] * h[..., None])
            y = jnp.einsum("bsin,bsn->bsi", state, h @ p[f"c{i}"])
            x = x + (y * jax.nn.silu(x @ p[f"gate{i}"])) @ p[f"out{i}"]
        return (x * x).mean()

    return by_adam(loss, weights, {"x": _f32(batch, seq, width)})


def depthwise(batch: int = 32, size: int = 32, layers: int = 2, width: int = 64) -> Built:
    """Depthwise convolutions of 7 x 7 and pointwise products, as ConvNeXt."""
    weights: dict[str, tuple[int, ...]] = {"patch": (4, 4, 3, width), "head": (width, 1000)}
    for i in range(layers):
        weights |= {f"depth{i}": (7, 7, 1, width), f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}

    def conv(x: jax.Array, w: jax.Array, stride: int, groups: int) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (stride,) * 2, "SAME", dimension_numbers=dims, feature_group_count=groups
        )

    def loss(p: Any, b: Any) -> Any:
        x = conv(b["image"], p["patch"], 4, 1)
        for i in range(layers):
            x = x + jax.nn.gelu(_norm(conv(x, p[f"depth{i}"], 1, width)) @ p[f"up{i}"]) @ p[f"down{i}"]
        return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ p["head"], b["labels"]).mean()

    return by_adam(loss, weights, {"image": _f32(batch, size, size, 3), "labels": _i32(batch)})


def adapters(batch: int = 64, seq: int = 32, layers: int = 2, width: int = 256, rank: int = 4) -> Built:
    """Low-rank adapters of a perceptron's weights, which come with the batch and are not trained, as LoRA."""
    pairs = {f"{n}{i}": s for i in range(layers) for n, s in (("a", (width, rank)), ("z", (rank, 4 * width)))}
    fixed = {f"fixed.{name}": _f32(*shape) for name, shape in _perceptrons(layers, width).items()}

    def loss(p: Any, b: Any) -> Any:
        x = b["x"]
        for i in range(layers):
            x = _norm(x + jax.nn.gelu(x @ (b[f"fixed.up{i}"] + p[f"a{i}"] @ p[f"z{i}"])) @ b[f"fixed.down{i}"])
        return ((x - b["y"]) ** 2).mean()

    return by_adam(loss, pairs, {"x": _f32(batch, seq, width), "y": _f32(batch, seq, width), **fixed})


def denoising(batch: int = 16, size: int = 16, width: int = 64) -> Built:
    """A diffusion model's U-Net: noise levels, residual convolutions, attention where the image is small."""
    weights: dict[str, tuple[int, ...]] = {"time": (32, width), "first": (3, 3, 3, width), "down": (3, 3, width, width)}
    weights |= {
        "deep": (3, 3, width, width),
        "up": (3, 3, 2 * width, width),
        "last": (3, 3, width, 3),
        **_attention_weights(1, width),
    }

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(p: Any, b: Any) -> Any:
        time = jnp.cos(b["level"][:, None] * jnp.arange(32.0)) @ p["time"]
        whole = jax.nn.silu(conv(b["image"], p["first"]) + time[:, None, None])
        half = jax.nn.silu(conv(whole, p["down"], 2))
        flat = half.reshape(batch, -1, width)
        half = (flat + _attend(p, 0, flat, flat)).reshape(half.shape)
        half = half + jax.nn.silu(conv(half, p["deep"]))
        up = jnp.repeat(jnp.repeat(half, 2, axis=1), 2, axis=2)
        out = conv(jax.nn.silu(conv(jnp.concatenate([up, whole], -1), p["up"])), p["last"])
        return ((out - b["noise"]) ** 2).mean()

    shapes = {"image": _f32(batch, size, size, 3), "noise": _f32(batch, size, size, 3), "level": _f32(batch)}
    return by_adam(loss, weights, shapes)


def lstm(batch: int = 64, seq: int = 32, layers: int = 2, width: int = 128, vocab: int = 2048) -> Built:
    """A language model of LSTMs."""
    weights: dict[str, tuple[int, ...]] = {"embed": (vocab, width), "head": (width, vocab)}
    weights |= {f"{n}{i}": (width, 4 * width) for i in range(layers) for n in ("input", "state")}

    def loss(p: Any, b: Any) -> Any:
        x = p["embed"][b["ids"]].swapaxes(0, 1)
        for i in range(layers):

            def one(carry: Any, at: jax.Array, i: int = i) -> Any:
                h, c = carry
                into, forget, out, new = jnp.split(at + h @ p[f"state{i}"], 4, axis=-1)
                c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(into) * jnp.tanh(new)
                h = jax.nn.sigmoid(out) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((batch, width))
            _, x = jax.lax.scan(one, (zeros, zeros), x @ p[f"input{i}"])
        logits = x.swapaxes(0, 1) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, b["labels"]).mean()

    return by_adam(loss, weights, {"ids": _i32(batch, seq), "labels": _i32(batch, seq)})


def latents(batch: int = 16, seq: int = 256, count: int = 32, layers: int = 2, width: int = 128) -> Built:
    """A few latent tokens that read many others and then each other, as Perceiver."""
    weights: dict[str, tuple[int, ...]] = {"embed": (64, width), "latent": (count, width), "head": (width, 100)}
    weights |= _attention_weights(2 * layers, width)
    weights |= {f"up{i}": (width, 4 * width) for i in range(layers)} | {
        f"down{i}": (4 * width, width) for i in range(layers)
    }

    def loss(p: Any, b: Any) -> Any:
        memory = b["x"] @ p["embed"]
        x = jnp.broadcast_to(p["latent"], (batch, count, width))
        for i in range(layers):
            x = _norm(x + _attend(p, 2 * i, x, memory))
            x = _norm(x + _attend(p, 2 * i + 1, x, x))
            x = _norm(x + jax.nn.gelu(x @ p[f"up{i}"]) @ p[f"down{i}"])
        return optax.softmax_cross_entropy_with_integer_labels(x.mean(1) @ p["head"], b["labels"]).mean()

    return by_adam(loss, weights, {"x": _f32(batch, seq, 64), "labels": _i32(batch)})


def linear_attention(batch: int = 32, seq: int = 64, layers: int = 2, width: int = 256) -> Built:
    """Attention without a softmax, by products of keys and values (Katharopoulos et al., 2020), not causal."""
    weights: Shapes = {**_attention_weights(layers, width), "head": (width, 512)}

    def loss(p: Any, b: Any) -> Any:
        x = b["x"]
        for i in range(layers):
            q, k, v = (_heads(x, p[f"{n}{i}"], 8) for n in ("wq", "wk", "wv"))
            q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
            mixed = jnp.einsum("bqhd,bhde->bqhe", q, jnp.einsum("bkhd,bkhe->bhde", k, v))
            mixed = mixed / (jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))[..., None] + 1e-3)
            x = _norm(x + mixed.reshape(x.shape) @ p[f"wo{i}"])
        return (jax.nn.log_softmax(x.mean(1) @ p["head"]) ** 2).mean()

    return by_adam(loss, weights, {"x": _f32(batch, seq, width)})
