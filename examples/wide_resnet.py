"""Wide-ResNet: bottleneck residual blocks whose 3x3 convolutions are widened; SGD with momentum.

    python -m examples.wide_resnet --preset tiny --steps 5

Published presets are those of Alpa's benchmarks (OSDI'22). Normalisation is by groups of channels, which keeps
examples apart; ``norm="batch"`` takes the statistics of the whole batch, as Alpa did, and cannot be cut into
microbatches.
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
    dtypes,
    materialize,
    normal,
    resolve,
    train_state,
)
from ._run import main

NORMS = ("group", "batch")
EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and options of the model.

    Attributes:
        stages: Blocks of each stage; stage i has ``base_channels * 2**i`` channels and halves the image if i > 0.
        base_channels: Channels of the stem and of the first stage; a block's output has 4 times its channels.
        width_factor: Multiplier of the channels that the 3x3 convolution of a block gives.
        classes: Classes.
        image: Height and width of the image.
        batch: Examples a step.
        dtype: Dtype of the computation.
        norm: "group" or "batch".
        groups: Groups of channels with ``norm="group"``; brought down to a divisor of the channels.
        small_stem: A 3x3 stem without pooling, for small images, instead of 7x7, stride 2 and pooling.
        learning_rate: Of SGD.
        seed: Seed of the parameters and of the data.
    """

    stages: tuple[int, ...] = (1, 1)
    base_channels: int = 16
    width_factor: int = 2
    classes: int = 16
    image: int = 16
    batch: int = 8
    dtype: str = "float32"
    norm: str = "group"
    groups: int = 8
    small_stem: bool = True
    learning_rate: float = 0.05
    seed: int = 0


def _published(base_channels: int, width_factor: int, stages: tuple[int, ...] = (3, 4, 6, 3)) -> Config:
    return Config(
        stages=stages,
        base_channels=base_channels,
        width_factor=width_factor,
        classes=1024,
        image=224,
        batch=8,
        groups=32,
        small_stem=False,
    )


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(),
        "small": Config(stages=(2, 2, 2), base_channels=32, classes=64, image=32, batch=16),
        "250M": _published(160, 2),
        "500M": _published(224, 2),
        "1B": _published(320, 2),
        "2B": _published(448, 2),
        "4B": _published(640, 2),
        "6.8B": _published(320, 16),
        "13B": _published(320, 16, (3, 4, 23, 3)),
    }
)


def _block_plan(config: Config) -> list[tuple[int, int, int]]:
    """Input channels, channels and stride of every block."""
    plan: list[tuple[int, int, int]] = []
    inputs = config.base_channels
    for stage, blocks in enumerate(config.stages):
        channels = config.base_channels * 2**stage
        for block in range(blocks):
            plan.append((inputs, channels, 2 if stage > 0 and block == 0 else 1))
            inputs = EXPANSION * channels
    return plan


def init_params(config: Config) -> Tree:
    """Initial parameters: ``{"stem", "blocks": [...], "head"}``; kernels are ``[height, width, in, out]``."""
    dtype, _ = dtypes(config.dtype)

    def unit(key: jax.Array, size: int, inputs: int, outputs: int, scale: float = 1.0) -> Tree:
        std = math.sqrt(2.0 / (size * size * inputs))
        return {
            "kernel": normal(key, (size, size, inputs, outputs), std, dtype),
            "scale": jnp.full((outputs,), scale, dtype),
            "bias": jnp.zeros((outputs,), dtype),
        }

    def block(key: jax.Array, inputs: int, channels: int, stride: int) -> Tree:
        keys = jax.random.split(key, 4)
        wide, outputs = channels * config.width_factor, EXPANSION * channels
        params = {
            "narrow": unit(keys[0], 1, inputs, channels),
            "spatial": unit(keys[1], 3, channels, wide),
            # A last scale of 0 would start the block as the identity but leave its kernels without gradient.
            "expand": unit(keys[2], 1, wide, outputs, 0.25),
        }
        if stride != 1 or inputs != outputs:
            params["shortcut"] = unit(keys[3], 1, inputs, outputs)
        return params

    plan = _block_plan(config)
    keys = jax.random.split(jax.random.key(config.seed), len(plan) + 2)
    features = EXPANSION * plan[-1][1]
    return {
        "stem": unit(keys[0], 3 if config.small_stem else 7, 3, config.base_channels),
        "blocks": [block(key, *sizes) for key, sizes in zip(keys[2:], plan, strict=True)],
        "head": {
            "kernel": normal(keys[1], (features, config.classes), 1.0 / math.sqrt(features), dtype),
            "bias": jnp.zeros((config.classes,), dtype),
        },
    }


def normalise(config: Config, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Group or batch normalisation in float32 or wider.

    Args:
        config: ``norm`` and ``groups``.
        x: ``[batch, height, width, channels]``.
        scale: ``[channels]``.
        bias: ``[channels]``.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims: tuple[int, ...] = (0, 1, 2)
    if config.norm == "group":
        channels = x.shape[-1]
        groups = math.gcd(config.groups, channels)
        wide = wide.reshape(*x.shape[:3], groups, channels // groups)
        dims = (1, 2, 4)
    wide = wide - jnp.mean(wide, axis=dims, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=dims, keepdims=True) + 1e-5)
    return (wide.reshape(x.shape) * scale + bias).astype(x.dtype)


def apply(config: Config, params: Tree, images: jax.Array) -> jax.Array:
    """Logits ``[batch, classes]`` of ``images`` ``[batch, height, width, 3]``."""

    def unit(x: jax.Array, p: Mapping[str, jax.Array], stride: int = 1) -> jax.Array:
        size = p["kernel"].shape[0]
        padding = ((size // 2, size // 2),) * 2
        kernel = p["kernel"].astype(x.dtype)
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return normalise(config, y, p["scale"], p["bias"])

    x = jax.nn.relu(unit(images, params["stem"], 1 if config.small_stem else 2))
    if not config.small_stem:
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    for p, (_, _, stride) in zip(params["blocks"], _block_plan(config), strict=True):
        y = jax.nn.relu(unit(x, p["narrow"]))
        y = unit(jax.nn.relu(unit(y, p["spatial"], stride)), p["expand"])
        x = jax.nn.relu(y + (unit(x, p["shortcut"], stride) if "shortcut" in p else x))
    x = jnp.mean(x, axis=(1, 2))
    logits: jax.Array = x @ params["head"]["kernel"].astype(x.dtype) + params["head"]["bias"].astype(x.dtype)
    return logits


def build(preset: str = "tiny", *, abstract: bool = False, **overrides: Any) -> tuple[TrainStep, tuple[Tree, Tree]]:
    """A train step of Wide-ResNet and its arguments.

    Args:
        preset: A name in ``PRESETS``.
        abstract: Give ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
        overrides: Fields of ``Config``.

    Returns:
        ``(train_step, (state, batch))``; the state is ``{"params", "opt_state", "step"}``, the batch
        ``{"images": [batch, image, image, 3], "labels": int32[batch]}``.

    Raises:
        TypeError: Unknown override.
        ValueError: Unknown preset or norm, or float64 without x64.
    """
    config = resolve(PRESETS, preset, overrides)
    if config.norm not in NORMS:
        raise ValueError(f"norm={config.norm!r}; known: {', '.join(NORMS)}")
    _, compute = dtypes(config.dtype)
    optimizer = optax.sgd(config.learning_rate, momentum=0.9)

    def create() -> tuple[Tree, Tree]:
        image_key, label_key = jax.random.split(jax.random.key(config.seed + 1))
        shape = (config.batch, config.image, config.image, 3)
        labels = jax.random.randint(label_key, (config.batch,), 0, config.classes, dtype=jnp.int32)
        batch = {"images": jax.random.normal(image_key, shape, compute), "labels": labels}
        return train_state(optimizer, init_params(config)), batch

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        logits = apply(config, params, batch["images"])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        picked = jnp.sum(logits * jax.nn.one_hot(batch["labels"], config.classes, dtype=logits.dtype), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return apply_optimizer(optimizer, state, grads), {"loss": loss}

    return train_step, materialize(create, abstract)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The train step of the tiny preset, for ``autopar plan examples.wide_resnet:train_step``."""
    return build(abstract=True)[0](state, batch)


def example_args() -> tuple[Tree, Tree]:
    """Shapes of the arguments of ``train_step``."""
    return build(abstract=True)[1]


if __name__ == "__main__":
    main(build, PRESETS)
