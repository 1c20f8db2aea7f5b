"""A transformer whose every second layer is a mixture of experts, gated as in GShard or Switch.

    python -m examples.moe --preset tiny --steps 5 --set gate=switch

Tokens are cut into groups of ``group`` tokens; each group routes on its own, so that groups split over devices.
The published presets are those of Alpa's benchmarks (OSDI'22), whose feed-forward blocks are 8 times as wide as
the residual stream; the name counts all experts.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

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
from ._gates import expert_capacity, gshard_gate, switch_gate
from ._run import main

GATES = ("gshard", "switch")
CHOICES = MappingProxyType({"gshard": 2, "switch": 1})


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and options of the model.

    Attributes:
        layers: Transformer layers; those of odd index are mixtures of experts.
        hidden: Width of the residual stream.
        ffn: Width inside a feed-forward block and inside an expert; None is ``8 * hidden``.
        heads: Query heads; divides ``hidden``.
        kv_heads: Key and value heads; divides ``heads``; None is ``heads``.
        vocab: Rows of the embedding table, which is the output projection too.
        seq: Tokens a sequence.
        batch: Sequences a step.
        dtype: Dtype of the computation; the router is in float32 or wider.
        experts: Experts a mixture.
        group: Tokens that are routed together; divides ``batch * seq``.
        gate: "gshard" (top-2) or "switch" (top-1).
        capacity_factor: See ``expert_capacity``.
        aux_weight: Weight of the auxiliary loss; alpha in Switch, k in GShard.
        random_routing: GShard only: drop the second expert at random. The state then carries a key, ``"rng"``.
        learning_rate: Of AdamW.
        seed: Seed of the parameters, of the data and of random routing.
    """

    layers: int = 2
    hidden: int = 64
    ffn: int | None = 128
    heads: int = 8
    kv_heads: int | None = None
    vocab: int = 128
    seq: int = 16
    batch: int = 8
    dtype: str = "float32"
    experts: int = 8
    group: int = 16
    gate: str = "gshard"
    capacity_factor: float = 1.0
    aux_weight: float = 0.01
    random_routing: bool = False
    learning_rate: float = 1e-3
    seed: int = 0


def _published(layers: int, hidden: int, experts: int) -> Config:
    return Config(
        layers=layers,
        hidden=hidden,
        ffn=None,
        heads=16,
        vocab=32000,
        seq=1024,
        batch=8,
        dtype="float16",
        experts=experts,
        group=2048,
        learning_rate=1e-4,
    )


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(),
        "small": Config(layers=4, hidden=256, ffn=512, vocab=1024, seq=128, batch=16, group=128),
        "380M": _published(8, 768, 8),
        "690M": _published(8, 768, 16),
        "1.3B": _published(16, 768, 16),
        "2.4B": _published(16, 1024, 16),
        "7.1B": _published(16, 1280, 32),
        "10B": _published(16, 1536, 32),
        "27B": _published(16, 2048, 48),
        "70B": _published(32, 2048, 64),
        "140B": _published(32, 2048, 128),
    }
)


def layer_norm(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    """Normalise the last dim in float32 or wider; ``p`` holds ``scale`` and ``bias``."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def moe_layer(
    config: Config, weights: Mapping[str, jax.Array], x: jax.Array, rng: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """A mixture of experts; a token dropped by the gate gives zeros.

    Args:
        config: Sizes.
        weights: ``router [hidden, experts]``, ``up [experts, hidden, ffn]``, ``down [experts, ffn, hidden]``.
        x: ``[batch, seq, hidden]``.
        rng: Key of random routing, or None.

    Returns:
        The output, like ``x``, and the auxiliary loss, not weighted.
    """
    tokens = x.reshape(-1, config.group, config.hidden)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("gsm,me->gse", tokens.astype(wide), weights["router"].astype(wide))
    capacity = expert_capacity(config.group, config.experts, CHOICES[config.gate], config.capacity_factor)
    routing = switch_gate(logits, capacity) if config.gate == "switch" else gshard_gate(logits, capacity, rng)
    inputs = jnp.einsum("gsec,gsm->egcm", routing.dispatch.astype(x.dtype), tokens)
    inner = jax.nn.relu(jnp.einsum("egcm,emh->egch", inputs, weights["up"].astype(x.dtype)))
    outputs = jnp.einsum("egch,ehm->egcm", inner, weights["down"].astype(x.dtype))
    mixed = jnp.einsum("gsec,egcm->gsm", routing.combine.astype(x.dtype), outputs)
    return mixed.reshape(x.shape), routing.loss


def init_params(config: Config) -> Tree:
    """Initial parameters: ``{"embed", "positions", "layers": [...], "norm"}``."""
    dtype, _ = dtypes(config.dtype)
    hidden, ffn = config.hidden, config.ffn or 8 * config.hidden
    kv_width = hidden // config.heads * (config.kv_heads or config.heads)
    outer = 0.02 / math.sqrt(2 * config.layers)

    def norm() -> Tree:
        return {"scale": jnp.ones((hidden,), dtype), "bias": jnp.zeros((hidden,), dtype)}

    def layer(key: jax.Array, mixture: bool) -> Tree:
        keys = jax.random.split(key, 7)
        lead = (config.experts,) if mixture else ()
        weights = {
            "norm1": norm(),
            "wq": normal(keys[0], (hidden, hidden), 0.02, dtype),
            "wk": normal(keys[1], (hidden, kv_width), 0.02, dtype),
            "wv": normal(keys[2], (hidden, kv_width), 0.02, dtype),
            "wo": normal(keys[3], (hidden, hidden), outer, dtype),
            "norm2": norm(),
            "up": normal(keys[4], (*lead, hidden, ffn), 0.02, dtype),
            "down": normal(keys[5], (*lead, ffn, hidden), outer, dtype),
        }
        if mixture:
            weights["router"] = normal(keys[6], (hidden, config.experts), 0.02, dtype)
        return weights

    keys = jax.random.split(jax.random.key(config.seed), config.layers + 2)
    return {
        "embed": normal(keys[0], (config.vocab, hidden), 0.02, dtype),
        "positions": normal(keys[1], (config.seq, hidden), 0.02, dtype),
        "layers": [layer(keys[i + 2], i % 2 == 1) for i in range(config.layers)],
        "norm": norm(),
    }


def apply(config: Config, params: Tree, tokens: jax.Array, rng: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Logits of the model and the sum of the auxiliary losses.

    Args:
        config: Sizes.
        params: As ``init_params`` gives them.
        tokens: int ``[batch, seq]``.
        rng: Key of random routing, or None.
    """
    _, compute = dtypes(config.dtype)
    split = (*tokens.shape, -1, config.hidden // config.heads)
    table = params["embed"].astype(compute)
    x = table[tokens] + params["positions"].astype(compute)
    aux = jnp.zeros((), jnp.promote_types(compute, jnp.float32))
    for index, w in enumerate(params["layers"]):
        y = layer_norm(x, w["norm1"])
        q, k, v = ((y @ w[name].astype(compute)).reshape(split) for name in ("wq", "wk", "wv"))
        x = x + causal_attention(q, k, v).reshape(x.shape) @ w["wo"].astype(compute)
        y = layer_norm(x, w["norm2"])
        if "router" in w:
            key = None if rng is None else jax.random.fold_in(rng, index)
            y, loss = moe_layer(config, w, y, key)
            aux = aux + loss
        else:
            y = jax.nn.relu(y @ w["up"].astype(compute)) @ w["down"].astype(compute)
        x = x + y
    return layer_norm(x, params["norm"]) @ table.T, aux


def build(preset: str = "tiny", *, abstract: bool = False, **overrides: Any) -> tuple[TrainStep, tuple[Tree, Tree]]:
    """A train step of the mixture of experts and its arguments.

    Args:
        preset: A name in ``PRESETS``.
        abstract: Give ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
        overrides: Fields of ``Config``.

    Returns:
        ``(train_step, (state, batch))``; the state is ``{"params", "opt_state", "step"}`` (and ``"rng"``, the data
        of a PRNG key, with random routing), the batch ``{"tokens", "labels"}``, int32 ``[batch, seq]``. Metrics are
        ``"loss"`` (with the auxiliary loss) and ``"aux_loss"`` (the sum over layers, not weighted).

    Raises:
        TypeError: Unknown override.
        ValueError: Unknown preset or gate, sizes that do not divide, or float64 without x64.
    """
    config = resolve(PRESETS, preset, overrides)
    check_divides(
        hidden_by_heads=(config.hidden, config.heads),
        heads_by_kv_heads=(config.heads, config.kv_heads or config.heads),
        batch_times_seq_by_group=(config.batch * config.seq, config.group),
    )
    if config.gate not in GATES:
        raise ValueError(f"gate={config.gate!r}; known: {', '.join(GATES)}")
    if config.random_routing and config.gate != "gshard":
        raise ValueError(f"random_routing is of gate='gshard', not of gate={config.gate!r}")
    if config.experts < CHOICES[config.gate]:
        raise ValueError(f"experts={config.experts}; gate={config.gate!r} needs {CHOICES[config.gate]} or more")
    dtypes(config.dtype)
    optimizer = optax.adamw(config.learning_rate)

    def create() -> tuple[Tree, Tree]:
        text_key, routing_key = jax.random.split(jax.random.key(config.seed + 1))
        state = train_state(optimizer, init_params(config))
        if config.random_routing:
            state["rng"] = jax.random.key_data(routing_key)
        return state, token_batch(text_key, config.batch, config.seq, config.vocab)

    def loss_fn(params: Tree, batch: Tree, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        logits, aux = apply(config, params, batch["tokens"], rng)
        return token_loss(logits, batch["labels"]) + config.aux_weight * aux, aux

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        rng = None
        if config.random_routing:
            rng = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch, rng)
        return apply_optimizer(optimizer, state, grads), {"loss": loss, "aux_loss": aux}

    return train_step, materialize(create, abstract)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The train step of the tiny preset, for ``autopar plan examples.moe:train_step``."""
    return build(abstract=True)[0](state, batch)


def example_args() -> tuple[Tree, Tree]:
    """Shapes of the arguments of ``train_step``."""
    return build(abstract=True)[1]


if __name__ == "__main__":
    main(build, PRESETS)
