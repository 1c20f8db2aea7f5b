"""GPT in flax nnx with AdamW: layers unrolled or scanned, embeddings tied, dropout and clipping optional.

    python -m examples.gpt --preset tiny --steps 5

Presets 125M to 76B are those of Alpa's benchmarks (OSDI'22); 175B is GPT-3 with its vocabulary padded to
51200; 1T is the largest model of Megatron-LM (SC'21). Batches of the published presets are small: set
``batch`` to what the experiment uses.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from . import _kernels
from ._common import (
    TrainStep,
    Tree,
    apply_optimizer,
    causal_attention,
    check_divides,
    dtypes,
    materialize,
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
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        ffn: Width inside the feed-forward block; None is ``4 * hidden``.
        heads: Query heads; divides ``hidden``.
        kv_heads: Key and value heads; divides ``heads``; None is ``heads``.
        vocab: Rows of the embedding table.
        seq: Tokens a sequence.
        batch: Sequences a step.
        dtype: Dtype of the computation.
        tied: Use the embedding table as output projection.
        dropout: Probability that an activation is dropped. Above 0 the state carries a key, ``"rng"``.
        scan: Stack the parameters of all blocks and loop over them with ``jax.lax.scan``.
        remat: Recompute each block in the backward pass (``jax.checkpoint``).
        remat_attention: Recompute attention between its projections ("selective" of Korthikanti et al., 2022).
        by_hand: Differentiate norms, softmax and GELU as kernels do that are written by hand (``_kernels``).
        masked: Add a ``"mask"`` of token weights to the batch and take the mean over those tokens.
        clip: Largest global norm of the gradients; None does not clip.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW, on every parameter.
        seed: Seed of the parameters, of the data and of dropout.
    """

    layers: int = 2
    hidden: int = 64
    ffn: int | None = None
    heads: int = 8
    kv_heads: int | None = None
    vocab: int = 128
    seq: int = 16
    batch: int = 8
    dtype: str = "float32"
    tied: bool = True
    dropout: float = 0.0
    scan: bool = False
    remat: bool = False
    remat_attention: bool = False
    by_hand: bool = False
    masked: bool = False
    clip: float | None = 1.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0


def _published(layers: int, hidden: int, heads: int, seq: int = 1024, dtype: str = "float16") -> Config:
    return Config(
        layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=seq, batch=8, dtype=dtype, learning_rate=1e-4
    )


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(),
        "small": Config(layers=4, hidden=256, heads=8, vocab=1024, seq=128, batch=16),
        "125M": _published(12, 768, 12),
        "350M": _published(24, 1024, 16),
        "760M": _published(24, 1536, 16),
        "1.3B": _published(24, 2048, 32),
        "2.6B": _published(32, 2560, 32),
        "6.7B": _published(32, 4096, 32),
        "15B": _published(48, 5120, 40),
        "39B": _published(48, 8192, 64),
        "76B": _published(60, 10240, 80),
        "175B": _published(96, 12288, 96, seq=2048, dtype="bfloat16"),
        "1T": _published(128, 25600, 160, seq=2048, dtype="bfloat16"),
    }
)


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _normed(norm: nnx.LayerNorm, x: jax.Array, *, by_hand: bool) -> jax.Array:
    if not by_hand:
        return norm(x)
    return _kernels.norm(x, norm.scale[...], norm.bias[...], norm.epsilon)


class Block(nnx.Module):
    """A pre-norm transformer block: causal attention, then a feed-forward block, each with a residual.

    Args:
        config: Sizes.
        rngs: Source of initial parameters.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        param_dtype, compute = dtypes(config.dtype)
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.hidden // config.heads
        self.rate = config.dropout
        attention = functools.partial(causal_attention, by_hand=config.by_hand)
        self.attention = jax.checkpoint(attention) if config.remat_attention else attention
        self.gelu = _kernels.gelu if config.by_hand else jax.nn.gelu
        self.normed = functools.partial(_normed, by_hand=config.by_hand)
        ffn = config.ffn or 4 * config.hidden
        norm = functools.partial(
            nnx.LayerNorm, dtype=compute, param_dtype=param_dtype, use_fast_variance=False, rngs=rngs
        )
        linear = functools.partial(nnx.Linear, dtype=compute, param_dtype=param_dtype, rngs=rngs)
        inner = nnx.initializers.normal(0.02)
        # The two projections into the residual stream start smaller, so that its variance does not grow with depth.
        outer = nnx.initializers.normal(0.02 / math.sqrt(2 * config.layers))
        kv_width = self.kv_heads * self.head_dim
        self.norm1 = norm(config.hidden)
        self.query = linear(config.hidden, config.hidden, kernel_init=inner)
        # Softmax ignores what a bias here would add to all scores of a query alike.
        self.key = linear(config.hidden, kv_width, kernel_init=inner, use_bias=False)
        self.value = linear(config.hidden, kv_width, kernel_init=inner)
        self.out = linear(config.hidden, config.hidden, kernel_init=outer)
        self.norm2 = norm(config.hidden)
        self.up = linear(config.hidden, ffn, kernel_init=inner)
        self.down = linear(ffn, config.hidden, kernel_init=outer)

    def __call__(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        """The block's output, like ``x`` ``[batch, seq, hidden]``; ``rng`` None is no dropout."""
        keys = (None, None) if rng is None else tuple(jax.random.split(rng))
        y = self.normed(self.norm1, x)
        split = (*x.shape[:2], -1, self.head_dim)
        mixed = self.attention(self.query(y).reshape(split), self.key(y).reshape(split), self.value(y).reshape(split))
        x = x + _dropout(self.out(mixed.reshape(x.shape)), self.rate, keys[0])
        y = self.gelu(self.up(self.normed(self.norm2, x)))
        return x + _dropout(self.down(y), self.rate, keys[1])


class Ends(nnx.Module):
    """What is not a block: token and position embeddings, the last norm and the output projection.

    Args:
        config: Sizes.
        rngs: Source of initial parameters.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        param_dtype, compute = dtypes(config.dtype)
        init = nnx.initializers.normal(0.02)
        embed = functools.partial(
            nnx.Embed, features=config.hidden, embedding_init=init, dtype=compute, param_dtype=param_dtype, rngs=rngs
        )
        self.tokens = embed(config.vocab)
        self.positions = embed(config.seq)
        self.norm = nnx.LayerNorm(
            config.hidden, dtype=compute, param_dtype=param_dtype, use_fast_variance=False, rngs=rngs
        )
        self.normed = functools.partial(_normed, by_hand=config.by_hand)
        linear = functools.partial(
            nnx.Linear, use_bias=False, kernel_init=init, dtype=compute, param_dtype=param_dtype, rngs=rngs
        )
        self.head = None if config.tied else linear(config.hidden, config.vocab)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Int tokens ``[batch, seq]`` to ``[batch, seq, hidden]``."""
        return self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1], dtype=jnp.int32))

    def logits(self, x: jax.Array) -> jax.Array:
        """``[batch, seq, hidden]`` to logits ``[batch, seq, vocab]``."""
        x = self.normed(self.norm, x)
        return self.tokens.attend(x) if self.head is None else self.head(x)


def make_model(config: Config) -> tuple[Callable[..., Tree], Callable[..., jax.Array]]:
    """The two functions of the model.

    Args:
        config: Sizes.

    Returns:
        ``init(key, share_trace=False)``, which gives the parameters ``{"ends", "blocks": [...]}`` (``share_trace``
        traces one block for all, which makes the shapes of 96 blocks quick; with ``scan`` ``"blocks"`` is one tree,
        whose arrays have a leading dim of ``config.layers``), and ``apply(params, tokens, rng=None)``, which gives
        logits ``[batch, seq, vocab]``; ``rng`` None is no dropout.
    """
    # All blocks share one graph: flax walks a module object by object, which for 96 blocks takes minutes.
    block_graph = nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))[0]
    ends_graph = nnx.split(nnx.eval_shape(lambda: Ends(config, nnx.Rngs(0))))[0]

    def init_part(kind: type[Block] | type[Ends], key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(kind(config, nnx.Rngs(key)), nnx.Param))

    def init(key: jax.Array, share_trace: bool = False) -> Tree:
        part = jax.jit(init_part, static_argnums=0) if share_trace else init_part
        keys = jax.random.split(key, config.layers + 1)
        if config.scan:
            return {"ends": part(Ends, keys[-1]), "blocks": jax.vmap(lambda k: init_part(Block, k))(keys[:-1])}
        return {"ends": part(Ends, keys[-1]), "blocks": [part(Block, k) for k in keys[:-1]]}

    def run_block(x: jax.Array, block: Tree, index: jax.Array | int | None, rng: jax.Array | None) -> jax.Array:
        mixed: jax.Array = nnx.merge(block_graph, block)(x, None if rng is None else jax.random.fold_in(rng, index))
        return mixed

    one_block = jax.checkpoint(run_block) if config.remat else run_block

    def apply(params: Tree, tokens: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        ends = nnx.merge(ends_graph, params["ends"])
        x = _dropout(ends.embed(tokens), config.dropout, rng)
        if config.scan:
            # Numbers that nothing reads would make equal runs of blocks different programs.
            indices = None if rng is None else jnp.arange(config.layers, dtype=jnp.int32)
            x, _ = jax.lax.scan(lambda y, own: (one_block(y, *own, rng), None), x, (params["blocks"], indices))
        else:
            for index, block in enumerate(params["blocks"]):
                x = one_block(x, block, index, rng)
        logits: jax.Array = ends.logits(x)
        return logits

    return init, apply


def build(preset: str = "tiny", *, abstract: bool = False, **overrides: Any) -> tuple[TrainStep, tuple[Tree, Tree]]:
    """A train step of GPT and its arguments.

    Args:
        preset: A name in ``PRESETS``.
        abstract: Give ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
        overrides: Fields of ``Config``.

    Returns:
        ``(train_step, (state, batch))``. The state is ``{"params", "opt_state", "step"}`` (and ``"rng"``, the
        data of a PRNG key, with dropout), the batch ``{"tokens", "labels"}``, int32 ``[batch, seq]`` (and
        ``"mask"``, float32).

    Raises:
        TypeError: Unknown override.
        ValueError: Unknown preset, sizes that do not divide, or float64 without x64.
    """
    config = resolve(PRESETS, preset, overrides)
    check_divides(
        hidden_by_heads=(config.hidden, config.heads),
        heads_by_kv_heads=(config.heads, config.kv_heads or config.heads),
    )
    param_dtype, _ = dtypes(config.dtype)
    adamw = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    optimizer = adamw if config.clip is None else optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    init, apply = make_model(config)

    def create() -> tuple[Tree, Tree]:
        state = train_state(optimizer, init(jax.random.key(config.seed), share_trace=abstract))
        text_key, mask_key, dropout_key = jax.random.split(jax.random.key(config.seed + 1), 3)
        if config.dropout > 0:
            state["rng"] = jax.random.key_data(dropout_key)
        batch = token_batch(text_key, config.batch, config.seq, config.vocab)
        if config.masked:
            batch["mask"] = jax.random.bernoulli(mask_key, 0.75, (config.batch, config.seq)).astype(param_dtype)
        return state, batch

    def loss_fn(params: Tree, batch: Mapping[str, jax.Array], rng: jax.Array | None) -> jax.Array:
        return token_loss(apply(params, batch["tokens"], rng), batch["labels"], batch.get("mask"))

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        rng = None
        if config.dropout > 0:
            rng = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, rng)
        return apply_optimizer(optimizer, state, grads), {"loss": loss}

    return train_step, materialize(create, abstract)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The train step of the tiny preset, for ``autopar plan examples.gpt:train_step``."""
    return build(abstract=True)[0](state, batch)


def example_args() -> tuple[Tree, Tree]:
    """Shapes of the arguments of ``train_step``."""
    return build(abstract=True)[1]


if __name__ == "__main__":
    main(build, PRESETS)
