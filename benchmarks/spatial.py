"""Bytes and CPU seconds of drawn convolution nets with few images, as shares of those of the best split by hand.

``python -m benchmarks spatial [--seed N] [--first N] [--cases N] [--cluster FILE]`` draws nets by a seed: U-Nets, nets
for video, denoisers and chains of convolutions without padding, of 1 to 8 images at three resolutions. Each is compiled
for eight CPU devices as planned, and by `jax.jit` with each split by hand: examples, rows, columns, pairs of these, and
channels. One parser reads all programs, as in `benchmarks.family_bytes`. The programs that send least then run in
turns, in CPU seconds of all threads together: as planned for this machine (`benchmarks.family_times`) and by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.cluster import Cluster
from benchmarks import family_times
from benchmarks.families import Built, by_adam, unet
from benchmarks.family_bytes import planned, sent_bytes
from benchmarks.report import Report, Row, Say

P = PartitionSpec
#: Height up to which pixels of `denoiser` attend to each other.
MOST_ATTENDED = 32
#: The axis of a mesh that splits channels of weights.
CHANNELS = "c"
#: By name the sizes of the mesh, and the axes of examples, height (or frames) and width (or height).
SPLITS: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = MappingProxyType(
    {
        "columns": ((8,), P(None, None, "a")),
        "channels": ((1, 1, 8), P()),
        "rows x channels": ((4, 1, 2), P(None, "a")),
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


def denoiser(batch: int, width: int, size: int) -> Built:
    """Group norms, a strided convolution, attention over pixels and bilinear interpolation, as in diffusion models."""
    n = 2 * width
    weights: dict[str, tuple[int, ...]] = {"in": (3, 3, 3, width), "down": (3, 3, width, n), "same": (3, 3, n, n)}
    weights |= {"query": (n, n), "key": (n, n), "value": (n, n), "up": (3, 3, n, width), "last": (3, 3, 2 * width, 3)}

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def normed(x: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 4, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        scaled = centred * lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
        return jax.nn.silu(scaled.reshape(x.shape))

    def attended(x: jax.Array, p: Any) -> jax.Array:
        pixels = x.reshape(x.shape[0], -1, x.shape[-1])
        scores = jnp.einsum("bqd,bkd->bqk", pixels @ p["query"], pixels @ p["key"]) * x.shape[-1] ** -0.5
        return x + (jax.nn.softmax(scores) @ (pixels @ p["value"])).reshape(x.shape)

    def loss(p: Any, b: Any) -> Any:
        whole = conv(b["image"], p["in"])
        half = conv(normed(whole), p["down"], 2)
        half = half + conv(normed(half), p["same"])
        half = attended(half, p) if size <= MOST_ATTENDED else half
        up = conv(jax.image.resize(half, (*whole.shape[:3], n), "bilinear"), p["up"])
        return ((conv(normed(jnp.concatenate([up, whole], -1)), p["last"]) - b["image"]) ** 2).mean()

    return by_adam(loss, weights, {"image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)})


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


def chain(batch: int, width: int, size: int, layers: int = 4) -> Built:
    """Convolutions without padding, each of which takes two rows and two columns."""
    weights = {"in": (3, 3, 3, width), **{f"same{k}": (3, 3, width, width) for k in range(layers)}}

    def loss(p: Any, b: Any) -> Any:
        x = b["image"]
        for name in weights:
            y = lax.conv_general_dilated(x, p[name], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(y)
        return (x**2).mean()

    return by_adam(loss, weights, {"image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)})


FAMILIES: Mapping[str, Callable[[int, int, int], Built]] = MappingProxyType(
    {"unet": unet, "pooled": pooled, "denoiser": denoiser, "video": video, "chain": chain}
)


@dataclass(frozen=True)
class SpatialCase:
    """One net.

    Args:
        family: of `FAMILIES`.
        batch: images or clips.
        width: features of the first level.
        size: height and width.
    """

    family: str
    batch: int
    width: int
    size: int

    def __str__(self) -> str:
        return f"{self.family}, batch {self.batch}, width {self.width}, size {self.size}"

    def build(self) -> Built:
        """Its train step."""
        return FAMILIES[self.family](self.batch, self.width, self.size)


def drawn(seed: int, count: int) -> list[SpatialCase]:
    """So many nets, the same for the same seed."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        family = rng.choice(tuple(FAMILIES))
        sizes = (16, 32) if family == "video" else (32, 64, 128)
        cases.append(SpatialCase(family, rng.choice((1, 2, 4, 8)), rng.choice((8, 12, 16)), rng.choice(sizes)))
    return cases


def _shardings(built: Built, split: str) -> tuple[Any, Any] | None:
    """Shardings of state and batch in a split; None where it divides no examples, rows or channels."""
    _, (state, batch) = built
    shape, spec = SPLITS[split]
    mesh = jax.make_mesh(shape, ("a", "b", "c")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
    sizes = dict(zip(mesh.axis_names, shape, strict=True))
    specs = {name: spec if leaf.ndim > 2 else P(*spec[:1]) for name, leaf in batch.items()}
    if any(n % sizes.get(a, 1) for k, leaf in batch.items() for n, a in zip(leaf.shape, specs[k], strict=False)):
        return None

    def of_weight(leaf: Any) -> NamedSharding:
        if "channels" not in split or leaf.ndim < 2 or leaf.shape[-1] % sizes[CHANNELS]:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), CHANNELS))

    return jax.tree.map(of_weight, state), {name: NamedSharding(mesh, s) for name, s in specs.items()}


def compiled_by_hand(built: Built, split: str) -> tuple[Any, Any] | None:
    """The program of a split with its shardings; None where it divides no examples, rows or channels."""
    step, (state, batch) = built
    shardings = _shardings(built, split)
    if shardings is None:
        return None
    jitted: Any = jax.jit(step, in_shardings=shardings, out_shardings=(shardings[0], None))
    return jitted.lower(state, batch).compile(), shardings


def by_hand(built: Built, split: str) -> float | None:
    """Bytes that a device sends in the program of a split; None where it divides no examples, rows or channels."""
    made = compiled_by_hand(built, split)
    return None if made is None else sent_bytes(made[0].as_text())


def seconds(built: Built, cluster: Cluster, splits: Mapping[str, float]) -> dict[str, float]:
    """Least CPU seconds of a step as planned for a cluster, and of each of ``splits``; see `family_times.seconds`."""
    step, shapes = built
    state, batch = family_times.drawn(shapes)
    function = autopar.parallelize(step, cluster=cluster, num_stages=1, num_microbatches=1)
    placed = function.shard(state, batch)
    programs: dict[str, Callable[[], Any]] = {"planned": lambda: function(*placed)}
    for split in splits:
        made = compiled_by_hand(built, split)
        assert made is not None
        given = jax.device_put(state, made[1][0]), jax.device_put(batch, made[1][1])
        programs[split] = lambda program=made[0], given=given: program(*given)  # type: ignore[misc]
    return family_times.seconds(programs)


def measure(case: SpatialCase, cluster: Cluster | None) -> Row:
    """The row of a net; without a cluster nothing runs."""
    built = case.build()
    every = {split: by_hand(built, split) for split in SPLITS}
    # What does not divide is whole everywhere: a program that sends nothing, not even gradients, is split in nothing.
    sent = {split: n for split, n in every.items() if n}
    best = min(sent, key=lambda split: sent[split])
    row: Row = {"case": str(case), "best": best, "bytes": planned(built), "best_bytes": sent[best]}
    row["bytes/best"] = row["bytes"] / row["best_bytes"]
    if cluster is not None:
        took = seconds(built, cluster, sent)
        planned_s = took.pop("planned")
        fastest = min(took, key=lambda split: took[split])
        row |= {"fastest": fastest, "cpu_s": planned_s, "best_cpu_s": took[fastest]}
        row["cpu/best"] = planned_s / took[fastest]
    return row


def run(quick: bool, say: Say, seed: int = 0, count: int = 8, file: Path | None = None, first: int = 0) -> Report:
    """The benchmark from net number ``first`` on; ``quick`` measures the bytes of one, ``file`` is a calibration's."""
    measured = family_times.measured_cluster if file is None else partial(Cluster.load, file)
    cluster = None if quick else measured()
    rows = []
    for case in drawn(seed, first + (1 if quick else count))[first:]:
        rows.append(measure(case, cluster))
        say(f"spatial: {rows[-1]}")
    met = all(row["bytes/best"] <= 1.0 and row.get("cpu/best", 1.0) <= 1.05 for row in rows)
    target = "bytes at most those of the best split by hand, CPU seconds at most 1.05 of the fastest"
    return Report("spatial", target, tuple(rows), met, (f"seed {seed}",), measured=("cpu_s", "best_cpu_s", "cpu/best"))
