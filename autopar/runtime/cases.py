"""Programs to time: every device of a mesh does the same on arrays of its own, once or many times in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cost.calibration import What

AXIS = "x"


@dataclass(frozen=True)
class Effort:
    """Extent of measurements.

    Args:
        products: sizes n of products of n x n matrices, and of as much arithmetic in other shapes.
        copies: bytes of arrays that are read and written.
        collectives: bytes a device of collectives.
        least_s: seconds that a program should take: short work is done several times in it.
        repeats: how often each program, and each transfer, is timed.
        images: sides of the images of convolutions; the smaller, the more features they have.
        features: of results of convolutions, and of gradients of kernels.
        summed_images: over which gradients of kernels sum.
        feature_side: height and width of the images of both.
        strides: bytes between elements that a copy in another order brings side by side.
        runs_bytes: bytes side by side that a sum adds up.
        summed_bytes: of a sum's operand.
        elements: of elementwise functions.
        first_touch: bytes of memory that is written for the first time.
        transfers: bytes of arrays that workers send to each other.
        pairs: of workers between which they are sent at most.
    """

    products: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    copies: tuple[int, ...] = tuple(4**k for k in range(6, 13))
    collectives: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
    least_s: float = 2e-2
    repeats: int = 9
    images: tuple[int, ...] = (8, 16, 32)
    features: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    summed_images: tuple[int, ...] = (1, 2, 4, 8)
    feature_side: int = 48
    strides: tuple[int, ...] = (128, 512, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 16, 1 << 19)
    runs_bytes: tuple[int, ...] = (32, 64, 256, 1024)
    summed_bytes: int = 1 << 22
    elements: int = 1 << 18
    first_touch: int = 1 << 26
    transfers: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    pairs: int = 28


QUICK = Effort(
    products=(32, 256),
    copies=(1 << 12, 1 << 20),
    collectives=(1 << 12, 1 << 18),
    least_s=2e-4,
    repeats=3,
    images=(8,),
    features=(1, 8, 64),
    summed_images=(1, 8),
    feature_side=16,
    strides=(1024, 4096),
    runs_bytes=(64, 1024),
    summed_bytes=1 << 18,
    elements=1 << 12,
    transfers=(1 << 10, 1 << 16, 1 << 22),
    pairs=6,
)
#: Seconds of measuring, for plans on the machine that measures.
HERE = Effort(
    products=(64, 512),
    copies=(1 << 12, 1 << 16, 1 << 21),
    collectives=(1 << 12, 1 << 18),
    least_s=1e-3,
    repeats=3,
    images=(8,),
    features=(1, 8, 16, 64),
    summed_images=(1, 2, 8),
    feature_side=32,
    strides=(1024, 4096),
    runs_bytes=(64, 1024),
    summed_bytes=1 << 19,
    elements=1 << 14,
    first_touch=1 << 24,
)


@dataclass(frozen=True)
class Case:
    """A program to time; ``make(runs)`` compiles it and returns what runs it.

    Args:
        what: kind of the sample.
        name: as in `autopar.cost.calibration.Sample`, like ``amount``, ``group`` and ``side_bytes``.
        amount: of one run.
        group: devices that a collective runs over.
        make: compiles it.
        repeated: whether it is run so often that it takes long enough.
        side_bytes: of a copy in another order or a sum.
        count: of features or images.
    """

    what: What
    name: str
    amount: float
    group: int
    make: Callable[[int], Callable[[], Any]]
    repeated: bool = True
    side_bytes: int = 0
    count: int = 0


def program(mesh: Mesh, body: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> Callable[[], Any]:
    """A program in which every device runs ``body`` on arrays of its own, of these shapes and dtypes."""
    n = mesh.size
    spec = PartitionSpec(mesh.axis_names)
    placed = [
        jax.device_put(np.full((n * shape[0], *shape[1:]), 1e-3, np.float32), NamedSharding(mesh, spec)).astype(dtype)
        for shape, dtype in shapes
    ]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False)
    compiled: Any = jax.jit(mapped).lower(*placed).compile()
    return lambda: compiled(*placed)


def looped(step: Callable[[Any], Any], runs: int) -> Callable[[Any], Any]:
    """``step`` done ``runs`` times, each on the result of the one before."""
    return lambda x: lax.fori_loop(0, runs, lambda _, y: step(y), x) if runs > 1 else step(x)
