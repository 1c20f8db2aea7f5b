"""Bytes that drawn convolution nets with few images send, as shares of those of the best split by hand.

``python -m benchmarks.spatial [SEED [COUNT]]`` draws U-Nets and nets for video by a seed, of 1 to 8 images at three
resolutions. Each is compiled for eight CPU devices as planned, and by `jax.jit` with each of the splits by hand: of
examples, rows, columns and pairs of these. One parser reads all programs, as in `benchmarks.family_bytes`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.families import Built, by_adam, unet
from benchmarks.family_bytes import planned, sent_bytes

P = PartitionSpec
#: By name the sizes of the mesh, and the axes of examples, height (or frames) and width (or height).
SPLITS: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = MappingProxyType(
    {
        "examples": ((8,), P("a")),
        "rows": ((8,), P(None, "a")),
        "rows x columns": ((4, 2), P(None, "a", "b")),
        "2 examples x rows": ((2, 4), P("a", "b")),
        "4 examples x rows": ((4, 2), P("a", "b")),
        "examples x rows x columns": ((2, 2, 2), P("a", "b", "c")),
    }
)


def pooled(batch: int, width: int, size: int, levels: int = 2) -> Built:
    """A U-Net with instance norms, pooling by overlapping windows, and transposed convolutions."""
    widths = [width * 2**k for k in range(levels + 1)]
    weights: dict[str, tuple[int, ...]] = {"in": (3, 3, 3, width), "out": (1, 1, width, 1)}
    for k in range(levels):
        weights |= {f"first{k}": (3, 3, widths[k], widths[k]), f"down{k}": (3, 3, widths[k], widths[k + 1])}
        weights |= {f"up{k}": (2, 2, widths[k + 1], widths[k]), f"last{k}": (3, 3, 2 * widths[k], widths[k])}
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        y = conv(x, w)
        centred = y - y.mean((1, 2), keepdims=True)
        return jax.nn.relu(centred * lax.rsqrt((centred**2).mean((1, 2), keepdims=True) + 1e-5))

    def loss(p: Any, b: Any) -> Any:
        x, skips = block(b["image"], p["in"]), []
        for k in range(levels):
            skips.append(x := block(x, p[f"first{k}"]))
            x = block(lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), p[f"down{k}"])
        for k in reversed(range(levels)):
            x = lax.conv_transpose(x, p[f"up{k}"], (2, 2), "SAME", dimension_numbers=numbers)
            x = block(jnp.concatenate([x, skips[k]], -1), p[f"last{k}"])
        return ((conv(x, p["out"]) - b["mask"]) ** 2).mean()

    shapes = {
        name: jax.ShapeDtypeStruct((batch, size, size, n), jnp.float32) for name, n in (("image", 3), ("mask", 1))
    }
    return by_adam(loss, weights, shapes)


def video(batch: int, width: int, size: int, frames: int = 16) -> Built:
    """Three-dimensional convolutions with strides, and a classifier of clips."""
    weights: dict[str, tuple[int, ...]] = {"in": (3, 3, 3, 3, width), "head": (4 * width, 10)}
    for k in range(2):
        n = width * 2**k
        weights |= {f"same{k}": (3, 3, 3, n, n), f"down{k}": (3, 3, 3, n, 2 * n)}

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        return jax.nn.relu(lax.conv_general_dilated(x, w, (stride,) * 3, "SAME", dimension_numbers=numbers))

    def loss(p: Any, b: Any) -> Any:
        x = conv(b["clip"], p["in"])
        for k in range(2):
            x = conv(conv(x, p[f"same{k}"]), p[f"down{k}"], 2)
        return -(jax.nn.log_softmax(x.mean((1, 2, 3)) @ p["head"]) * b["label"]).sum(-1).mean()

    clip = jax.ShapeDtypeStruct((batch, frames, size, size, 3), jnp.float32)
    return by_adam(loss, weights, {"clip": clip, "label": jax.ShapeDtypeStruct((batch, 10), jnp.float32)})


@dataclass(frozen=True)
class SpatialCase:
    """One net.

    Args:
        family: "unet", "pooled" or "video".
        batch: images or clips.
        width: features of the first level.
        size: height and width.
    """

    family: str
    batch: int
    width: int
    size: int

    def build(self) -> Built:
        """Its train step."""
        if self.family == "unet":
            return unet(self.batch, self.width, self.size)
        return (pooled if self.family == "pooled" else video)(self.batch, self.width, self.size)


def drawn(seed: int, count: int) -> list[SpatialCase]:
    """So many nets, the same for the same seed."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        family = rng.choice(("unet", "pooled", "video"))
        sizes = (16, 32) if family == "video" else (32, 64, 128)
        cases.append(SpatialCase(family, rng.choice((1, 2, 4, 8)), rng.choice((8, 12, 16)), rng.choice(sizes)))
    return cases


def by_hand(built: Built, split: str) -> float | None:
    """Bytes that a device sends in the program of a split; None where it divides no examples or rows."""
    step, (state, batch) = built
    shape, spec = SPLITS[split]
    mesh = jax.make_mesh(shape, ("a", "b", "c")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
    specs = {name: spec if leaf.ndim > 2 else P(spec[0]) for name, leaf in batch.items()}
    sizes = dict(zip(mesh.axis_names, shape, strict=True))
    if any(n % sizes.get(a, 1) for k, leaf in batch.items() for n, a in zip(leaf.shape, specs[k], strict=False)):
        return None
    states = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
    batches = {name: NamedSharding(mesh, s) for name, s in specs.items()}
    compiled: Any = jax.jit(step, in_shardings=(states, batches), out_shardings=(states, None), donate_argnums=0)
    return sent_bytes(compiled.lower(state, batch).compile().as_text())


def main(seed: int = 0, count: int = 8) -> None:
    """Prints a line a net."""
    for case in drawn(seed, count):
        built = case.build()
        sent = {split: by_hand(built, split) for split in SPLITS}
        best, least = min(((k, n) for k, n in sent.items() if n is not None), key=lambda e: e[1])
        ours = planned(built)
        print(f"{case}: {ours / least:.3f} of {best} ({ours:.0f} of {least:.0f} bytes)", flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main(*map(int, sys.argv[1:]))
