"""Runs resharding steps on one device's piece, inside ``jax.shard_map``: a step is one collective.

For a tuple of axes jax numbers the devices of a group with the first axis major, in every collective used
here and in ``axis_index``; layouts name axes major first too, so that pieces keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.cluster import LogicalMesh
from autopar.lower.localize.base import AxisIndex, as_bytes, axis_names
from autopar.lower.narrow import apply_narrow
from autopar.sharding.reshard import ReshardStep


def apply_steps(steps: Sequence[ReshardStep], array: Any, mesh: LogicalMesh, index: AxisIndex = lax.axis_index) -> Any:
    """The piece after ``steps``.

    Args:
        steps: from `autopar.sharding.reshard.PathTables.path`.
        array: this device's piece, in the layout that the steps start from.
        mesh: the logical mesh; its axes are those of the enclosing ``shard_map``.
        index: which piece this is.
    """
    if not steps:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # Keys as the numbers that they are: one more dim, behind those that the steps name.
        data = apply_steps(steps, jax.random.key_data(array), mesh, index)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    if array.dtype.name in ("int2", "uint2"):
        return as_bytes(lambda a: apply_steps(steps, a, mesh, index), array)
    for step in steps:
        if step.kind == "collective-permute" and array.size:
            array = _permute(array, step.axes, mesh, index)
            continue
        sizes = tuple(mesh.sizes[a] for a in step.axes)
        array = _empty(step, array, sizes) if array.size == 0 else _apply(step, array, sizes, index)
    return array


def _apply(step: ReshardStep, array: Any, sizes: tuple[int, ...], index: AxisIndex) -> Any:
    axes = axis_names(index, step.axes)
    if step.wire:
        return apply_narrow(step, array, axes, math.prod(sizes))
    match step.kind:
        case "all-reduce":
            return _all_reduce(array, axes, step.reduce)
        case "reduce-scatter":
            return _in_reals(lambda a: lax.psum_scatter(a, axes, scatter_dimension=step.dim, tiled=True), array)
        case "all-gather":
            return lax.all_gather(array, axes, axis=step.dim, tiled=True)
        case "all-to-all":
            # XLA's CPU compiler cannot do with what another all-to-all made, which it takes apart and forwards.
            held = lax.optimization_barrier(array)
            return lax.all_to_all(held, axes, split_axis=step.to_dim, concat_axis=step.dim, tiled=True)
        case "slice":
            size = array.shape[step.dim] // math.prod(sizes)
            return lax.dynamic_slice_in_dim(array, index(step.axes) * size, size, step.dim)
        case "mask":
            if step.reduce != "sum":
                return array
            return jnp.where(index(step.axes) == 0, array, jnp.zeros_like(array))
        case _:
            raise ValueError(f"no step is called {step.kind!r}")


def _permute(array: Any, axes: tuple[str, ...], mesh: LogicalMesh, index: AxisIndex) -> Any:
    ordered = tuple(sorted(axes, key=mesh.names.index))
    sizes = (mesh.sizes[a] for a in axes)
    return lax.ppermute(array, axis_names(index, ordered), exchange(*sizes, transposed=ordered != axes))


def exchange(a: int, b: int, *, transposed: bool = False) -> tuple[tuple[int, int], ...]:
    """(from, to) of a permutation over two axes of sizes ``a`` (major) and ``b``, after which b is major.

    Piece number p lies on device p before; afterwards on the device (i, j) whose j * a + i is p.

    Args:
        a: size of the axis that is major before.
        b: size of the other.
        transposed: whether the numbers in the pairs count devices with b major. jax wants the axes of a permutation
            in the order of the mesh, whichever is major in the layout.
    """

    def number(device: int) -> int:
        return device % b * a + device // b if transposed else device

    return tuple((number(j * a + i), number(i * b + j)) for i in range(a) for j in range(b))


def _all_reduce(array: Any, axes: tuple[str, ...], reduce: str) -> Any:
    if reduce == "sum":
        return _in_reals(lambda a: lax.psum(a, axes), array)
    # As bytes: collectives of bool are not everywhere, and the plan counts one byte an element.
    numbers = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    total = lax.pmax(numbers, axes) if reduce in ("max", "or") else lax.pmin(numbers, axes)
    return total.astype(array.dtype)


def _in_reals(total: Callable[[Any], Any], array: Any) -> Any:
    """A sum over devices, of complex numbers as pairs of real ones: XLA's CPU compiler ends the process where the
    complex numbers are constants."""
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return total(array)
    pairs = total(jnp.stack([array.real, array.imag], axis=-1))
    return lax.complex(pairs[..., 0], pairs[..., 1])


def _empty(step: ReshardStep, array: Any, sizes: tuple[int, ...]) -> Any:
    """The step on an array without elements: only its shape changes, and nothing is sent."""
    shape, n = list(array.shape), math.prod(sizes)
    if step.kind in ("slice", "reduce-scatter"):
        shape[step.dim] //= n
    elif step.kind == "all-gather":
        shape[step.dim] *= n
    elif step.kind == "all-to-all":
        shape[step.dim] *= n
        shape[step.to_dim] //= n
    return jnp.zeros(shape, array.dtype)
