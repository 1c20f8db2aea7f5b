"""CPU seconds of a first call of a small model, next to those of `jax.jit` with `NamedSharding`.

A transformer of four layers in flax.nnx, and one in equinox where that is installed, with AdamW on eight virtual
devices, each call in a process of its own: tracing, planning, compiling and running. Nothing is kept on disk before:
neither plans nor compiled loops. The jitted step has its state on every device and its batch split.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar._compat.files import CACHE_VARIABLE
from benchmarks.clusters import DEVICES
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say

TARGET = 1.3
WIDTH, HEADS, VOCABULARY, TOKENS = 64, 4, 256, 32


class Block(nnx.Module):
    """A layer of the nnx model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """The layer's output."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """A transformer in flax.nnx."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        """Logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def nnx_step(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any]]:
    """The step of the nnx model, its arguments, and what jits it."""
    model = Model(layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, tokens: Any, labels: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), labels).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    return step, (model, optimizer, *_batch()), nnx.jit


def equinox_step(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any]]:
    """Likewise in equinox: residual perceptrons over tokens."""
    import equinox as eqx  # here: a package of `make test-public` alone

    keys = jax.random.split(jax.random.key(0), layers + 2)
    embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
    blocks = [eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=k) for k in keys[1:-1]]
    model = (embed, blocks, eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[-1]))
    optimizer = optax.adamw(1e-3)

    def logits(model: Any, token: Any) -> Any:
        embed, blocks, out = model
        x = embed(token)
        for block in blocks:
            x = x + block(x)
        return out(x)

    def step(model: Any, state: Any, tokens: Any, labels: Any) -> Any:
        def loss(model: Any) -> Any:
            found = jax.vmap(jax.vmap(lambda token: logits(model, token)))(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, *_batch()), eqx.filter_jit


MODELS = {"nnx": nnx_step, "equinox": equinox_step}


def _batch() -> tuple[Any, Any]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (32, TOKENS)).astype(np.int32)
    return tokens, tokens


def call_s(model: str, layers: int, decorated: bool) -> float:
    """CPU seconds of the first call, in a process that has done nothing else."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    step, args, jit = MODELS[model](layers)
    jax.block_until_ready(jax.tree.leaves(nnx.state(args[0]) if model == "nnx" else args[:2]))
    with tempfile.TemporaryDirectory() as kept:
        os.environ[CACHE_VARIABLE] = kept
        function: Any = autopar.parallelize(step) if decorated else jit(step)
        if not decorated:
            args = _sharded(model, args)
        began_s = time.process_time()
        jax.block_until_ready(function(*args))
        return time.process_time() - began_s


def _sharded(model: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """State on every device, the batch split."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    *state, tokens, labels = args
    if model == "nnx":
        for x in state:
            nnx.update(x, jax.device_put(nnx.state(x), everywhere))
    else:
        state = [
            jax.tree.map(lambda a: jax.device_put(a, everywhere) if isinstance(a, jax.Array) else a, x) for x in state
        ]
    return (*state, jax.device_put(tokens, split), jax.device_put(labels, split))


def measure(model: str, layers: int) -> Row:
    """The row of a model."""
    jit_s, decorated_s = (in_new_process(call_s, model, layers, decorated) for decorated in (False, True))
    return {
        "model": f"{model}, {layers} layers",
        "jit_s": jit_s,
        "call_s": decorated_s,
        "call/jit": decorated_s / jit_s,
    }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one layer of nnx and holds it to no target."""
    names = [name for name in MODELS if name == "nnx" or find_spec(name) is not None]
    rows = []
    for name in names[:1] if quick else names:
        say(f"newcomers: {name}")
        rows.append(measure(name, 1 if quick else 4))
    return Report(
        "newcomers",
        f"a first call takes at most {TARGET} of the CPU time of that of a jitted step",
        tuple(rows),
        quick or all(row["call/jit"] <= TARGET for row in rows),
        measured=("jit_s", "call_s"),
    )
