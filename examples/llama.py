"""LLaMA as a plain pytree: layers stacked, scanned and recomputed in the backward pass.

    python -m examples.llama --preset tiny --steps 5

RMSNorm, rotary positions, grouped key and value heads, SwiGLU, an output projection of its own. Presets 8B, 70B
and 405B are those of LLaMA 3.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import _kernels
from ._common import (
    TrainStep,
    Tree,
    apply_optimizer,
    causal_attention,
    check_divides,
    dtypes,
    materialize,
    normal,
    resolve,
    token_batch,
    token_loss,
    train_state,
)
from ._run import main


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and options of the model.

    Attributes:
        layers: Transformer layers.
        hidden: Width of the residual stream.
        ffn: Width inside the feed-forward block; None is ``4 * hidden``.
        heads: Query heads; divides ``hidden``, with an even quotient.
        kv_heads: Key and value heads; divides ``heads``; None is ``heads``.
        vocab: Rows of the embedding table.
        seq: Tokens a sequence.
        batch: Sequences a step.
        dtype: Dtype of the computation.
        unroll: Loop over the layers in Python instead of ``jax.lax.scan``.
        remat: Recompute each layer in the backward pass (``jax.checkpoint``).
        by_hand: Differentiate norms, softmax and SwiGLU as kernels do that are written by hand (``_kernels``).
        eight_bits: Products of layers take operands in 8 bits, without scales (``_kernels.product_in_8_bits``).
        rope_theta: Base of the rotary frequencies.
        learning_rate: Of Adam.
        seed: Seed of the parameters and of the data.
    """

    layers: int = 2
    hidden: int = 64
    ffn: int | None = 128
    heads: int = 8
    kv_heads: int | None = 8
    vocab: int = 128
    seq: int = 16
    batch: int = 8
    dtype: str = "float32"
    unroll: bool = False
    remat: bool = True
    by_hand: bool = False
    eight_bits: bool = False
    rope_theta: float = 500_000.0
    learning_rate: float = 1e-3
    seed: int = 0


def _published(layers: int, hidden: int, ffn: int, heads: int) -> Config:
    return Config(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=8,
        vocab=128256,
        seq=8192,
        batch=8,
        dtype="bfloat16",
        learning_rate=1e-4,
    )


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(),
        "small": Config(layers=4, hidden=256, ffn=512, heads=8, kv_heads=4, vocab=1024, seq=128, batch=16),
        "8B": _published(32, 4096, 14336, 32),
        "70B": _published(80, 8192, 28672, 64),
        "405B": _published(126, 16384, 53248, 128),
    }
)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root of the mean square over the last dim, in float32 or wider, and scale.

    Args:
        x: ``[..., hidden]``.
        scale: ``[hidden]``.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def rms_norm_by_hand(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`rms_norm` with the gradient of a kernel that is written by hand."""
    return _kernels.norm(x, scale, None, 1e-5)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (RoFormer, section 3.2.2), with the two halves of a head as the pairs.

    Args:
        x: ``[batch, seq, heads, head_dim]``, ``head_dim`` even.
        theta: Base of the frequencies: pair ``i`` turns by ``theta ** (-2i / head_dim)`` a position.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    half = x.shape[-1] // 2
    exponent = jnp.arange(half, dtype=wide.dtype) / half
    position = jnp.arange(x.shape[1], dtype=wide.dtype)
    angle = position[:, None] * jnp.exp(-math.log(theta) * exponent)[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = wide[..., :half], wide[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def init_params(config: Config) -> Tree:
    """Initial parameters; every array under ``"layers"`` has a leading dim of ``config.layers``."""
    dtype, _ = dtypes(config.dtype)
    count, hidden, ffn = config.layers, config.hidden, config.ffn or 4 * config.hidden
    kv_width = hidden // config.heads * (config.kv_heads or config.heads)
    keys = iter(jax.random.split(jax.random.key(config.seed), 9))
    outer = 0.02 / math.sqrt(2 * count)
    return {
        "embed": normal(next(keys), (config.vocab, hidden), 0.02, dtype),
        "layers": {
            "norm1": jnp.ones((count, hidden), dtype),
            "wq": normal(next(keys), (count, hidden, hidden), 0.02, dtype),
            "wk": normal(next(keys), (count, hidden, kv_width), 0.02, dtype),
            "wv": normal(next(keys), (count, hidden, kv_width), 0.02, dtype),
            "wo": normal(next(keys), (count, hidden, hidden), outer, dtype),
            "norm2": jnp.ones((count, hidden), dtype),
            "gate": normal(next(keys), (count, hidden, ffn), 0.02, dtype),
            "up": normal(next(keys), (count, hidden, ffn), 0.02, dtype),
            "down": normal(next(keys), (count, ffn, hidden), outer, dtype),
        },
        "norm": jnp.ones((hidden,), dtype),
        "head": normal(next(keys), (hidden, config.vocab), 0.02, dtype),
    }


def apply(config: Config, params: Tree, tokens: jax.Array) -> jax.Array:
    """Logits of the model.

    Args:
        config: Sizes.
        params: As ``init_params`` gives them.
        tokens: int ``[batch, seq]``.

    Returns:
        ``[batch, seq, vocab]`` in the dtype of the computation.
    """
    _, compute = dtypes(config.dtype)
    head_dim = config.hidden // config.heads
    norm = rms_norm_by_hand if config.by_hand else rms_norm
    product = _kernels.product_in_8_bits if config.eight_bits else jnp.matmul
    swiglu = _kernels.swiglu if config.by_hand else lambda gate, up: jax.nn.silu(gate) * up

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        w = {name: value.astype(compute) for name, value in weights.items()}
        split = (*x.shape[:2], -1, head_dim)
        y = norm(x, w["norm1"])
        q = rotate(product(y, w["wq"]).reshape(split), config.rope_theta)
        k = rotate(product(y, w["wk"]).reshape(split), config.rope_theta)
        mixed = causal_attention(q, k, product(y, w["wv"]).reshape(split), by_hand=config.by_hand)
        x = x + product(mixed.reshape(x.shape), w["wo"])
        y = norm(x, w["norm2"])
        return x + product(swiglu(product(y, w["gate"]), product(y, w["up"])), w["down"])

    body = jax.checkpoint(layer) if config.remat else layer
    x = params["embed"].astype(compute)[tokens]
    if config.unroll:
        for index in range(config.layers):
            x = body(x, {name: stack[index] for name, stack in params["layers"].items()})
    else:
        x, _ = jax.lax.scan(lambda carry, weights: (body(carry, weights), None), x, params["layers"])
    logits: jax.Array = norm(x, params["norm"]) @ params["head"].astype(compute)
    return logits


def build(preset: str = "tiny", *, abstract: bool = False, **overrides: Any) -> tuple[TrainStep, tuple[Tree, Tree]]:
    """A train step of LLaMA and its arguments.

    Args:
        preset: A name in ``PRESETS``.
        abstract: Give ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
        overrides: Fields of ``Config``.

    Returns:
        ``(train_step, (state, batch))``; the state is ``{"params", "opt_state", "step"}``, the batch
        ``{"tokens", "labels"}``, int32 ``[batch, seq]``.

    Raises:
        TypeError: Unknown override.
        ValueError: Unknown preset, sizes that do not divide, or float64 without x64.
    """
    config = resolve(PRESETS, preset, overrides)
    check_divides(
        hidden_by_twice_the_heads=(config.hidden, 2 * config.heads),
        heads_by_kv_heads=(config.heads, config.kv_heads or config.heads),
    )
    dtypes(config.dtype)
    optimizer = optax.adam(config.learning_rate, b2=0.95)

    def create() -> tuple[Tree, Tree]:
        batch = token_batch(jax.random.key(config.seed + 1), config.batch, config.seq, config.vocab)
        return train_state(optimizer, init_params(config)), batch

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        return token_loss(apply(config, params, batch["tokens"]), batch["labels"])

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return apply_optimizer(optimizer, state, grads), {"loss": loss}

    return train_step, materialize(create, abstract)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The train step of the tiny preset, for ``autopar plan examples.llama:train_step``."""
    return build(abstract=True)[0](state, batch)


def example_args() -> tuple[Tree, Tree]:
    """Shapes of the arguments of ``train_step``."""
    return build(abstract=True)[1]


if __name__ == "__main__":
    main(build, PRESETS)
