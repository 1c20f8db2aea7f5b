"""Collectives to time: of each kind and size, in groups of several sizes as the axes of meshes make them.

All groups of a node run side by side, as in a step: of neighbours, as those of a last axis, and of devices as far apart
as those of a first one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from autopar.cluster.mesh import prime_factors
from autopar.runtime.cases import AXIS, Case, Effort, looped, program

#: Side of matrices between whose products there are collectives, and elements of these.
_SIDE, _SMALL = 256, 256
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def layouts(devices: int) -> tuple[tuple[int, int, int], ...]:
    """Shapes of meshes whose second axis is the group: each size that a division of ``devices`` has, near and far.

    Sizes are products of the first prime factors: 2, 4 and 8 of eight devices.
    """
    sizes = itertools.accumulate(prime_factors(devices), operator.mul)
    near_and_far = ((n, ((devices // n, n, 1), (1, n, devices // n))) for n in sizes)
    return tuple(shape for _, shapes in near_and_far for shape in dict.fromkeys(shapes))


def collective_cases(devices: Sequence[Any], effort: Effort) -> list[Case]:
    """Programs of all kinds, sizes and groups.

    Args:
        devices: two or more.
        effort: sizes.
    """
    places = np.array(devices, dtype=object)
    meshes = [
        Mesh(places.reshape(shape), ("far", AXIS, "near"), axis_types=(AxisType.Auto,) * 3)
        for shape in layouts(len(devices))
    ]
    collectives = [_case(mesh, kind, size) for kind in KINDS for mesh in meshes for size in effort.collectives]
    by_size = {mesh.shape[AXIS]: mesh for mesh in meshes}
    return [*collectives, _between(meshes[0], ""), *(_between(mesh, "all-reduce") for mesh in by_size.values())]


def _between(mesh: Mesh, kind: str) -> Case:
    """Products of one device, and after each an all-reduce of what is small."""

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        product, small = state
        product = product @ product
        small = small + product[0, 0]
        return product, lax.psum(small, AXIS) if kind else small * 2

    def make(runs: int) -> Callable[[], Any]:
        def body(x: Any, y: Any) -> Any:
            return looped(step, runs)((x, y))[1]

        return program(mesh, body, [((_SIDE, _SIDE), jnp.float32), ((_SMALL,), jnp.float32)])

    return Case("between", kind, 4.0 * _SMALL, mesh.shape[AXIS] if kind else 1, make)


def _case(mesh: Mesh, kind: str, size: int) -> Case:
    n = mesh.shape[AXIS]
    # As many elements as every device can split evenly.
    length = max(n, size // 4 // n * n)
    full = {"all-gather": length * n, "all-to-all": length * n}

    def step(y: Any) -> Any:
        match kind:
            case "all-reduce":  # sums that overflow take no longer
                return lax.psum(y, AXIS)
            case "reduce-scatter":
                return lax.dynamic_update_slice(y, lax.psum_scatter(y, AXIS, tiled=True), (0,))
            case "all-gather":
                return lax.all_gather(y, AXIS, tiled=True)[:length]
            case "all-to-all":
                return lax.all_to_all(y, AXIS, 0, 0, tiled=True)
            case _:
                return lax.ppermute(y, AXIS, [(i, (i + 1) % n) for i in range(n)])

    def make(runs: int) -> Callable[[], Any]:
        return program(mesh, looped(step, runs), [((length,), jnp.float32)])

    return Case("collective", kind, 4.0 * full.get(kind, length), n, make)
