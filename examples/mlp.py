"""A multilayer perceptron as a plain pytree, with momentum by hand or Adam from optax.

    python -m examples.mlp --preset tiny --steps 5

With ``--set optimizer=adam`` the optimizer is Adam.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from ._common import TrainStep, Tree, dtypes, materialize, normal, resolve
from ._run import main

ADAM_RATE = 1e-3
MOMENTUM_RATE = 0.1
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the network.

    Attributes:
        layers: Weight matrices, each ``[hidden, hidden]``.
        hidden: Width of the input, of every layer and of the output.
        batch: Examples a step.
        dtype: Dtype of the computation.
        optimizer: "sgd" (momentum, by hand) or "adam" (optax).
        seed: Seed of the parameters and of the data.
    """

    layers: int = 4
    hidden: int = 32
    batch: int = 16
    dtype: str = "float32"
    optimizer: str = "sgd"
    seed: int = 0


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(),
        "small": Config(layers=8, hidden=256, batch=64),
        "large": Config(layers=16, hidden=8192, batch=1024, dtype="bfloat16"),
    }
)


def build(preset: str = "tiny", *, abstract: bool = False, **overrides: object) -> tuple[TrainStep, tuple[Tree, Tree]]:
    """A train step of the network and its arguments.

    Args:
        preset: A name in ``PRESETS``.
        abstract: Give ``jax.ShapeDtypeStruct`` leaves and allocate nothing.
        overrides: Fields of ``Config``.

    Returns:
        ``(train_step, (state, batch))``; batch is ``{"x", "y"}``, each ``[batch, hidden]``.

    Raises:
        TypeError: Unknown override.
        ValueError: Unknown preset or optimizer, or float64 without x64.
    """
    config = resolve(PRESETS, preset, overrides)
    if config.optimizer not in ("sgd", "adam"):
        raise ValueError(f"optimizer={config.optimizer!r}; known: sgd, adam")
    param_dtype, compute = dtypes(config.dtype)
    if config.optimizer == "adam":
        import optax  # here, so that momentum needs no package beside autopar

        adam = optax.adam(ADAM_RATE)

    def create() -> tuple[Tree, Tree]:
        keys = jax.random.split(jax.random.key(config.seed), config.layers + 2)
        shape = (config.hidden, config.hidden)
        params = [
            {
                "w": normal(keys[i], shape, math.sqrt(2.0 / config.hidden), param_dtype),
                "b": jnp.zeros((config.hidden,), param_dtype),
            }
            for i in range(config.layers)
        ]
        moments = adam.init(params) if config.optimizer == "adam" else jax.tree.map(jnp.zeros_like, params)
        state = {"params": params, "opt_state": moments, "step": jnp.zeros((), jnp.int32)}
        x = jax.random.normal(keys[-2], (config.batch, config.hidden), compute)
        y = jax.random.normal(keys[-1], (config.batch, config.hidden), compute)
        return state, {"x": x, "y": y}

    def loss_fn(params: list[dict[str, jax.Array]], batch: Mapping[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for i, layer in enumerate(params):
            x = x @ layer["w"].astype(compute) + layer["b"].astype(compute)
            if i < len(params) - 1:
                x = jax.nn.relu(x)
        error = (x - batch["y"]).astype(param_dtype)
        return jnp.mean(error * error)

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        if config.optimizer == "adam":
            updates, moments = adam.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        else:
            moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["opt_state"], grads)
            params = jax.tree.map(lambda p, m: p - MOMENTUM_RATE * m, state["params"], moments)
        return {"params": params, "opt_state": moments, "step": state["step"] + 1}, {"loss": loss}

    return train_step, materialize(create, abstract)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The train step of the tiny preset, for ``autopar plan examples.mlp:train_step``."""
    return build(abstract=True)[0](state, batch)


def example_args() -> tuple[Tree, Tree]:
    """Shapes of the arguments of ``train_step``."""
    return build(abstract=True)[1]


if __name__ == "__main__":
    main(build, PRESETS)
