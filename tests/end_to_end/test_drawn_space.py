"""Drawn convolution nets split over space: values and gradients are those of one device, and images stay split."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from tests.search.problems import toy

SIDE, FEATURES = 32, 4
#: By name the axes of a mesh, and the spec of images.
MESHES: dict[str, tuple[dict[str, int], P]] = {
    "rows": ({"a": 8}, P(None, "a")),
    "columns": ({"a": 8}, P(None, None, "a")),
    "rows x columns": ({"a": 4, "b": 2}, P(None, "a", "b")),
    "columns x rows": ({"a": 2, "b": 4}, P(None, "b", "a")),
}
LAYERS = (
    "same", "strided", "dilated", "grouped", "wrap", "reflect", "symmetric", "roll", "largest", "mean", "skip", "norm",
    "bilinear", "nearest", "transposed", "pixels", "padded",
)  # fmt: skip


def conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    given = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **given)


def windowed(x: jax.Array, start: float, add: Any, size: int, padding: str) -> jax.Array:
    return lax.reduce_window(x, start, add, (1, size, size, 1), (1, 2, 2, 1), padding)


def layer(name: str, x: jax.Array, w: Any, old: jax.Array) -> jax.Array:
    """One layer; those that make images smaller or larger come in pairs (`drawn_layers`)."""
    if name in ("wrap", "reflect", "symmetric"):
        return conv(jnp.pad(x, ((0, 0), (1, 1), (2, 0), (0, 0)), mode=name), w["same"], padding="VALID")
    if name == "roll":
        return x + jnp.roll(x, (1, -2), (1, 2))
    if name == "padded":
        return conv(jnp.pad(x, ((0, 0), (2, 0), (1, 1), (0, 0))), w["same"], padding="VALID")
    if name == "norm":
        groups = x.reshape(*x.shape[:3], 2, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        return (centred * lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-3)).reshape(x.shape)
    if name == "skip":
        return conv(jnp.concatenate([x, old], -1), w["joined"]) if x.shape == old.shape else x
    if name == "pixels":
        pixels = x.reshape(x.shape[0], -1, FEATURES)
        return (jax.nn.softmax(pixels @ w["mix"] @ pixels.swapaxes(1, 2)) @ pixels).reshape(x.shape)
    options: dict[str, Any] = {
        "same": {},
        "strided": {"window_strides": (2, 2)},
        "dilated": {"rhs_dilation": (2, 2)},
        "grouped": {"feature_group_count": 2},
    }
    if name in options:
        return conv(x, w["grouped" if name == "grouped" else "same"], **options[name])
    if name == "largest":
        return windowed(x, -jnp.inf, lax.max, 3, "SAME")
    if name == "mean":
        return windowed(x, 0.0, lax.add, 2, "VALID") / 4
    if name == "transposed":
        return lax.conv_transpose(x, w["same"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], FEATURES), name)


def drawn_layers(seed: int) -> list[str]:
    """Names of layers of a net: some that keep the size, around one that halves it and one that doubles it."""
    rng = random.Random(seed)
    kept = [n for n in LAYERS if n not in ("strided", "largest", "mean", "bilinear", "nearest", "transposed", "pixels")]
    small = [*kept, "pixels"]
    names = [rng.choice(kept), rng.choice(kept), rng.choice(("strided", "largest", "mean")), rng.choice(small)]
    return [*names, rng.choice(("bilinear", "nearest", "transposed")), rng.choice(kept)]


def step(names: list[str]) -> Any:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        y = conv(x, w["same"])
        old = y
        for name in names:
            y = jnp.tanh(layer(name, y, w, old))
        return (jnp.sin(y) * jnp.cos(3 * x)).mean()

    return lambda w, x: jax.value_and_grad(loss, (0, 1))(w, x)


def check(seed: int, mesh: str) -> Counter[str]:
    """Compares a net with one device; returns bytes by kind of message. Links are slow: bytes decide, not FLOPs."""
    axes, spec = MESHES[mesh]
    rng = np.random.default_rng(seed)
    n = FEATURES
    shapes = {"same": (3, 3, n, n), "grouped": (3, 3, n // 2, n), "joined": (1, 1, 2 * n, n), "mix": (n, n)}
    w = {k: jnp.asarray(rng.standard_normal(s) / np.sqrt(np.prod(s[:-1]))) for k, s in shapes.items()}
    x = jnp.asarray(rng.standard_normal((1, SIDE, SIDE, n)))
    names = drawn_layers(seed)
    given: dict[str, Any] = {"constraints": {"x": spec}, "mesh_axes": axes, "batch_argnums": (1,)}
    parallel = autopar.parallelize(
        step(names), cluster=toy(8, bandwidth=1e6), num_stages=1, num_microbatches=1, **given
    )
    compiled = parallel.compile(w, x)
    got, want = compiled(w, x), jax.jit(step(names))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-10 * float(jnp.abs(b).max()), err_msg=f"{names} on {mesh}")
    sent = Counter[str]()
    for c in compiled.plan.communication:
        sent[c.kind] += int(c.count * c.bytes)
    return sent


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 32))])
def test_values_are_those_of_one_device(seed: int) -> None:
    with jax.enable_x64(True):
        check(seed, sorted(MESHES)[seed % len(MESHES)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", sorted(MESHES))
@pytest.mark.parametrize("seed", range(8))
def test_images_stay_split(seed: int, mesh: str) -> None:
    """Edges are sent, and sums of weights and statistics; of images at most the first, into a split that sends less."""
    if "pixels" in drawn_layers(seed):
        return  # keys and values of all pixels are gathered, or go around
    with jax.enable_x64(True):
        sent = check(seed, mesh)
    image, weights = SIDE * SIDE * FEATURES * 8, 8 * (2 * 9 * 16 + 32 + 16)
    assert sent["all-to-all"] + sent["all-gather"] <= image + 2 * weights < 2 * image
