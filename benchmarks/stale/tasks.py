"""Small tasks that need no download: a quadratic, pictures of digits, characters of the project's own documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

#: Curvatures of the quadratic, and its rate: stable for delays up to 7 (2 sin(pi / 30) = 0.209), not for 8 (0.185).
CURVATURES = tuple(np.linspace(0.05, 1.0, 16))
RATE = 0.2

_GLYPHS = """
.###. ..#.. .###. .###. #..#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# #..#. #.... #.... ....# #...# #...#
#...# ..#.. ...#. ..##. ##### ####. ####. ...#. .###. .####
#...# ..#.. ..#.. #...# ...#. ....# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. ####. .###. ..#.. .###. .###.
"""


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        name: of the row.
        init: parameters from a key: a list of layers.
        loss: of parameters and a batch.
        batch: one from a key.
        held_out: a batch that is never trained on.
        optimizer: optax's.
    """

    name: str
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[Any], Any]
    held_out: Any
    optimizer: optax.GradientTransformation


def tasks(quick: bool) -> tuple[Task, ...]:
    """All tasks, or the smallest."""
    return (quadratic(),) if quick else (quadratic(), digits(), characters())


def quadratic() -> Task:
    """Mean of ``curvature / 2 (w - noise)^2``: four layers of four curvatures each; plain SGD."""
    curvature = jnp.array(CURVATURES, jnp.float32).reshape(4, 4)

    def loss(params: Any, noise: Any) -> Any:
        w = jnp.stack(params)
        return jnp.mean(jnp.sum(curvature * (w - noise) ** 2, axis=(1, 2)) / 2)

    def batch(key: Any) -> Any:
        return 0.01 * jax.random.normal(key, (8, 4, 4))

    def init(key: Any) -> Any:
        return list(1.0 + 0.1 * jax.random.normal(key, (4, 4)))

    return Task("quadratic", init, loss, batch, jnp.zeros((1, 4, 4)), optax.sgd(RATE))


def digits(size: int = 32) -> Task:
    """Digits of 5 x 5 points somewhere in 8 x 8, with noise: four layers; SGD with momentum.

    Args:
        size: examples a batch.
    """
    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    glyphs = np.array([[[c == "#" for c in rows[y][d]] for y in range(5)] for d in range(10)], np.float32)
    whole = jnp.pad(glyphs, ((0, 0), (0, 3), (0, 3)))

    def drawn(key: Any, count: int) -> Any:
        which, shift, noise = jax.random.split(key, 3)
        labels = jax.random.randint(which, (count,), 0, 10)
        shifts = jax.random.randint(shift, (count, 2), 0, 4)
        images = jax.vmap(lambda d, s: jnp.roll(whole[d], s, (0, 1)))(labels, shifts)
        return (images + 0.3 * jax.random.normal(noise, images.shape)).reshape(count, 64), labels

    def init(key: Any) -> Any:
        return _layers(key, (64, 48, 48, 48, 10))

    def loss(params: Any, batch: Any) -> Any:
        return _cross_entropy(_perceptron(params, batch[0]), batch[1])

    return Task(
        "digits", init, loss, lambda key: drawn(key, size), drawn(jax.random.key(999), 512), optax.sgd(0.05, 0.9)
    )


def characters(size: int = 32, context: int = 8) -> Task:
    """The next character of the documents from those before it: five layers; AdamW.

    Args:
        size: examples a batch.
        context: characters that are read.
    """
    folder = Path(__file__).parents[2]
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("README.md", "docs/architecture.md"))
    alphabet = sorted(set(text))
    codes = jnp.array([alphabet.index(c) for c in text], jnp.int32)
    trained = len(text) * 9 // 10

    def at(places: Any) -> Any:
        window = codes[places[:, None] + jnp.arange(context + 1)]
        return window[:, :-1], window[:, -1]

    def batch(key: Any) -> Any:
        return at(jax.random.randint(key, (size,), 0, trained - context - 1))

    def init(key: Any) -> Any:
        first, rest = jax.random.split(key)
        table = 0.5 * jax.random.normal(first, (len(alphabet), 12))
        return [{"table": table}, *_layers(rest, (12 * context, 64, 64, len(alphabet)))]

    def loss(params: Any, batch: Any) -> Any:
        x = params[0]["table"][batch[0]].reshape(len(batch[0]), -1)
        return _cross_entropy(_perceptron(params[1:], x), batch[1])

    held_out = at(jnp.arange(trained, len(text) - context - 1, 7))
    return Task("characters", init, loss, batch, held_out, optax.adamw(3e-3))


def _layers(key: Any, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (a, b)) * np.sqrt(2 / a), "b": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]


def _perceptron(params: Any, x: Any) -> Any:
    for n, p in enumerate(params):
        x = x @ p["w"] + p["b"]
        x = jax.nn.relu(x) if n < len(params) - 1 else x
    return x


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
