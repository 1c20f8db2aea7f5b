"""Runs resharding steps on one device's shard, inside ``jax.shard_map``: a step is one collective.

For a tuple of axes jax numbers the devices of a group with the first axis major, in every collective used
here and in ``axis_index``; layouts name axes major first too, so that shards keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.world import gloo_sends
from autopar.cluster import LogicalMesh
from autopar.lower.localize.base import AxisIndex, as_bytes, axis_names, permuted
from autopar.sharding.reshard import ReshardStep
from autopar.transforms.formats import Encoded, Format


def apply_steps(steps: Sequence[ReshardStep], array: Any, mesh: LogicalMesh, index: AxisIndex = lax.axis_index) -> Any:
    """The shard after ``steps``.

    Args:
        steps: from `autopar.sharding.reshard.PathTables.path`.
        array: this device's shard, in the layout that the steps start from.
        mesh: the logical mesh; its axes are those of the enclosing ``shard_map``.
        index: which shard this is.
    """
    if not steps:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # Keys as the numbers that they are: one more dim, after those that the steps name.
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
            return _in_reals(lambda a: scattered_sum(a, axes, step.dim, math.prod(sizes)), array)
        case "all-gather":
            return lax.all_gather(array, axes, axis=step.dim, tiled=True)
        case "all-to-all":
            return _exchanged(array, axes, step.to_dim, step.dim, tiled=True)
        case "slice":
            size = array.shape[step.dim] // math.prod(sizes)
            return lax.dynamic_slice_in_dim(array, index(step.axes) * size, size, step.dim)
        case "mask":
            if step.reduce != "sum":
                return array
            return jnp.where(index(step.axes) == 0, array, jnp.zeros_like(array))
        case _:
            raise ValueError(f"no step is called {step.kind!r}")


def scattered_sum(array: Any, axes: Any, dim: int, group: int) -> Any:
    """This device's shard of the sum over a group.

    Gloo's reduce-scatter overwrites what it still sends, which gives other numbers where a message is larger than what
    the socket takes at once. Parts go by an all-to-all there and each device sums those of its shard: as many bytes.

    Args:
        array: this device's term.
        axes: names of the mesh axes, as jax takes them.
        dim: of the array, which is split.
        group: devices in a group along them.
    """
    if not gloo_sends():
        return lax.psum_scatter(array, axes, scatter_dimension=dim, tiled=True)
    shape = array.shape
    parts = array.reshape(*shape[:dim], group, shape[dim] // group, *shape[dim + 1 :])
    return jnp.sum(_exchanged(parts, axes, dim, dim), axis=dim, dtype=array.dtype)


def _exchanged(array: Any, axes: Any, split: int, joined: int, *, tiled: bool = False) -> Any:
    """An all-to-all of the parts of a dim."""
    # XLA's CPU compiler cannot do with what another all-to-all made, which it takes apart and forwards.
    held = lax.optimization_barrier(array)
    return lax.all_to_all(held, axes, split_axis=split, concat_axis=joined, tiled=tiled)


def _permute(array: Any, axes: tuple[str, ...], mesh: LogicalMesh, index: AxisIndex) -> Any:
    ordered = tuple(sorted(axes, key=mesh.names.index))
    sizes = (mesh.sizes[a] for a in axes)
    return permuted(array, ordered, exchange(*sizes, transposed=ordered != axes), index)


def exchange(a: int, b: int, *, transposed: bool = False) -> tuple[tuple[int, int], ...]:
    """(from, to) of a permutation over two axes of sizes ``a`` (major) and ``b``, after which b is major.

    Shard number p lies on device p before; afterwards on the device (i, j) whose j * a + i is p.

    Args:
        a: size of the axis that is major before.
        b: size of the other.
        transposed: whether the numbers in the pairs count devices with b major. jax wants the axes of a permutation in
            the order of the mesh, whichever is major in the layout.
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


def apply_narrow(step: ReshardStep, array: Any, axes: Any, group: int) -> Any:
    """The shard after a step that is sent in a format.

    Args:
        step: a gather or a sum with a format.
        array: this device's shard before.
        axes: names of the mesh axes, as jax takes them.
        group: devices in a group along them.
    """
    format, shape = Format.parse(step.wire), list(array.shape)
    if step.kind == "all-gather":
        rows = _gathered(format, array.reshape(-1), axes).astype(array.dtype)
        shape[step.dim] *= group
        return jnp.moveaxis(rows.reshape(group, *array.shape), 0, step.dim).reshape(shape)
    if step.kind == "reduce-scatter":
        shape[step.dim] //= group
        parts = array.reshape(*array.shape[: step.dim], group, *shape[step.dim :])
        rows = jnp.moveaxis(parts, step.dim, 0).reshape(group, -1)
        return _summed(format, rows, axes).reshape(shape).astype(array.dtype)
    flat = array.reshape(-1)
    chunk = -(-flat.size // group)
    rows = jnp.pad(flat, (0, chunk * group - flat.size)).reshape(group, chunk)
    whole = _gathered(format, _summed(format, rows, axes), axes).reshape(-1)
    return whole[: flat.size].reshape(shape).astype(array.dtype)


def _gathered(format: Format, flat: Any, axes: Any) -> Any:
    """``flat`` of every device of a group, ``[group, elements]`` in float32."""
    sent = lax.all_gather(_message(format.encode(flat)), axes, axis=0, tiled=False)
    return _decoded(format, sent, flat.size)


def _summed(format: Format, rows: Any, axes: Any) -> Any:
    """The sum over a group of the row that is this device's, in float32."""
    sent = _exchanged(_message(format.encode(rows)), axes, 0, 0, tiled=True)
    return jnp.sum(_decoded(format, sent, rows.shape[-1]), axis=0)


def _message(encoded: Encoded) -> Any:
    """Codes and scales as bytes, ``[..., bytes]``."""
    codes = _bytes(encoded.codes)
    if not encoded.scales.size:
        return codes
    lead = encoded.scales.shape[:-1]
    return jnp.concatenate([codes.reshape(*lead, -1), _bytes(encoded.scales)], axis=-1)


def _bytes(array: Any) -> Any:
    """An array's bytes, those of the last dim together."""
    if array.dtype == jnp.uint8:
        return array
    raw = lax.bitcast_convert_type(array, jnp.uint8)
    return raw if raw.ndim == array.ndim else raw.reshape(*array.shape[:-1], -1)


def _decoded(format: Format, message: Any, elements: int) -> Any:
    """The numbers in ``message``, ``[..., elements]`` in float32."""
    lead = message.shape[:-1]
    if format.name == "bf16":
        codes = lax.bitcast_convert_type(message.reshape(*lead, elements, 2), jnp.bfloat16)
        return codes.astype(jnp.float32)
    _, blocks = format.blocks(elements)
    codes, scales = jnp.split(message, [message.shape[-1] - 4 * blocks], axis=-1)
    codes = codes.reshape(*lead, blocks, -1)
    floats = lax.bitcast_convert_type(scales.reshape(*lead, blocks, 4), jnp.float32)
    dtype = format.code_dtype
    encoded = Encoded(codes if dtype == jnp.uint8 else lax.bitcast_convert_type(codes, dtype), floats)
    return format.decode(encoded, (*lead, elements))
