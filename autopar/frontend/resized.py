"""Reads, writes and products by fixed tables, as `jax.image.resize` has them, said so that a split dim stays split.

Nearest neighbours are reads at fixed positions, and their gradients are added there. Where each element is read so many
times, or every so many-th is read, that is a broadcast, or a slice. Linear and cubic interpolation are products with a
fixed matrix whose nonzeros lie in a band: a piece of the result needs a piece of the other operand and edges of its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend.fixed import FixedValues
from autopar.ir import Attr, Literal, Operand, TensorType

#: Elements under a row's window, as a share of the dim, up to which a matrix counts as banded.
_MOST_SHARE = 0.25


@dataclass(frozen=True)
class Positions:
    """Fixed positions along a dim: ``first``, and ``step`` further each time; each of them ``times`` times."""

    first: int
    step: int
    times: int

    @staticmethod
    def of(values: Any, size: int) -> Positions | None:
        """Repeats of all elements of a dim of ``size``, or the step between the elements read; None if neither."""
        count = len(values)
        if count > size > 1 and count % size == 0:
            times = count // size
            return Positions(0, 1, times) if np.array_equal(values, np.arange(count) // times) else None
        if not 1 < count < size:
            return None
        first, step = int(values[0]), int(values[1]) - int(values[0])
        last = first + (count - 1) * step
        fits = step > 1 and first >= 0 and last < size
        return Positions(first, step, 1) if fits and np.array_equal(values, np.arange(first, last + 1, step)) else None


def is_resizing(primitive: str) -> bool:
    """Whether a primitive may be a read, or the gradient of one, at fixed positions."""
    return primitive in ("gather", "scatter-add", "scatter_add")


def resized(
    primitive: str, params: Mapping[str, Any], types: Sequence[TensorType], indices: Callable[[], Any]
) -> Callable[..., Any] | None:
    """A function of the first and the last operand that computes a read or write at fixed positions; None for others.

    Args:
        primitive: one of which `is_resizing` is true.
        params: of the equation.
        types: of its operands.
        indices: their value where it is fixed, else None.
    """
    reads = primitive == "gather"
    numbers = params["dimension_numbers"]
    whole, given = types[0], types[1]
    picked = numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims
    single = numbers.collapsed_slice_dims if reads else numbers.inserted_window_dims
    windows = numbers.offset_dims if reads else numbers.update_window_dims
    if len(picked) != 1 or tuple(single) != tuple(picked) or numbers.operand_batching_dims or given.rank != 2:
        return None
    (dim,) = picked
    others = tuple(d for d in range(whole.rank) if d != dim)
    sizes = params["slice_sizes"] if reads else types[2].shape
    if tuple(windows) != others or given.shape[1] != 1 or any(sizes[d] != whole.shape[d] for d in others):
        return None
    values = indices()
    positions = None if values is None else Positions.of(values[:, 0], whole.shape[dim])
    if positions is None:
        return None
    return _read(positions, dim, given.shape[0]) if reads else _written(positions, dim, whole.shape[dim])


def _read(positions: Positions, dim: int, count: int) -> Callable[..., Any]:
    def read(x: Any, _: Any) -> Any:
        if positions.times == 1:
            limit = positions.first + (count - 1) * positions.step + 1
            return lax.slice_in_dim(x, positions.first, limit, positions.step, dim)
        shape = [*x.shape[: dim + 1], positions.times, *x.shape[dim + 1 :]]
        repeated = lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != dim + 1])
        return lax.reshape(repeated, [*x.shape[:dim], count, *x.shape[dim + 1 :]])

    return read


def _written(positions: Positions, dim: int, size: int) -> Callable[..., Any]:
    def written(x: Any, updates: Any) -> Any:
        if positions.times == 1:
            last = positions.first + (updates.shape[dim] - 1) * positions.step
            config = [(0, 0, 0)] * updates.ndim
            config[dim] = (positions.first, size - 1 - last, positions.step - 1)
            return lax.add(x, lax.pad(updates, jnp.zeros((), updates.dtype), config))
        shape = [*updates.shape[:dim], size, positions.times, *updates.shape[dim + 1 :]]
        return lax.add(x, jnp.sum(lax.reshape(updates, shape), dim + 1, dtype=updates.dtype))

    return written


def equations_of(function: Callable[..., Any], types: Sequence[TensorType]) -> Any:
    """The jaxpr of ``function`` on operands of ``types``."""
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in types)).jaxpr


def band_attrs(
    params: Mapping[str, Any], operands: Sequence[Operand], fixed: FixedValues
) -> tuple[tuple[str, Attr], ...]:
    """The attribute ``band`` of a product with a fixed matrix whose nonzeros lie in a band; none for other products.

    It is (operand that is not fixed, then size, count, step, extent, pad, dilation of its windows as of
    `autopar.sharding.halo.Halo`).

    Args:
        params: of the product.
        operands: of the product.
        fixed: computes values.
    """
    contracted, batch = params["dimension_numbers"]
    if batch[0] or len(contracted[0]) != 1:
        return ()
    for side in (0, 1):
        matrix = None if isinstance(operands[side], Literal) else fixed.value(operands[side])
        if matrix is None or matrix.ndim != 2:
            continue
        windows = windows_of(matrix if contracted[side][0] == 0 else matrix.T)
        if windows is not None:
            return (("band", (1 - side, *windows)),)
    return ()


def windows_of(matrix: Any) -> tuple[int, ...] | None:
    """The band of a matrix whose rows are elements of a dim and whose columns are elements of the result.

    Args:
        matrix: a numpy array of two dims.

    Returns size, count, step, extent, pad and dilation of windows that cover all nonzeros of their columns; None where
    they cover more than a quarter of the dim.
    """
    size, count = matrix.shape
    shared = math.gcd(size, count)
    step, dilation = size // max(1, shared), count // max(1, shared)
    rows, columns = np.nonzero(matrix)
    if not len(rows) or not np.isfinite(matrix).all():
        return None
    offsets = rows * dilation - columns * step
    pad = -int(offsets.min())
    extent = int(offsets.max()) + pad + 1
    return (size, count, step, extent, pad, dilation) if extent <= _MOST_SHARE * size * dilation else None
