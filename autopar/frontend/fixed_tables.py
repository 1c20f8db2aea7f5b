"""Reads, writes and products by fixed tables, as `jax.image.resize` has them, said so that a split dim stays split.

Nearest neighbours are reads at fixed positions, and their gradients are added there. Where each element is read so
many times, or every so many-th is read, that is a broadcast, or a slice. Linear and cubic interpolation are products
with a fixed matrix whose nonzeros lie in a band: a piece of the result needs a piece of the other operand and edges of
its neighbours.

`resized` and `band_attrs` are called for each equation. `FixedValues` computes the tables with numpy, so that no
device is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Attr, Literal, Operand, Operator, TensorType

_LARGEST = 1 << 23
_LONGEST_CHAIN = 200
#: (operator, its operands) -> its result.
_Compute = Callable[[Operator, list[Any]], Any]
#: Elements under a row's window, as a share of the dim, up to which a matrix counts as banded.
_MOST_SHARE = 0.25


class _UnknownError(Exception):
    """The value depends on an input, or on an operator that is not in the table."""


@dataclass(frozen=True)
class FixedValues:
    """Computes values of a graph in the making that depend on none of its inputs.

    Args:
        producers: operator that makes a value, by the value's name.
        known: values that were asked for; None of those that cannot be computed here.
    """

    producers: Mapping[str, Operator]
    known: MutableMapping[str, Any] = field(default_factory=dict)

    def value(self, operand: Operand) -> Any:
        """The value as a numpy array; None where it depends on an input or is too large to look at."""
        try:
            return self._value(operand, _LONGEST_CHAIN)
        except _UnknownError:
            return None

    def _value(self, operand: Operand, room: int) -> Any:
        if isinstance(operand, Literal):
            return _literal(operand)
        if operand not in self.known:
            self.known[operand] = None
            op = self.producers.get(operand)
            if op is None or not room or op.results[0].type.size > _LARGEST or op.primitive not in _COMPUTED:
                raise _UnknownError
            with np.errstate(all="ignore"):
                result = _COMPUTED[op.primitive](op, [self._value(o, room - 1) for o in op.operands])
            self.known[operand] = np.asarray(result, numpy_dtype(op.results[0].type.dtype))
        if self.known[operand] is None:
            raise _UnknownError
        return self.known[operand]


def _literal(operand: Literal) -> Any:
    text, dtype = operand.text, operand.type.dtype
    if dtype.startswith(("c", "key")):
        raise _UnknownError
    value: Any = text == "True" if dtype == "bool" else float(text) if "f" in dtype else int(text)
    return np.asarray(value, numpy_dtype(dtype))


def _iota(op: Operator, _: list[Any]) -> Any:
    shape, dim = op.results[0].type.shape, op.integer("dimension")
    return np.broadcast_to(np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _broadcast(op: Operator, operands: list[Any]) -> Any:
    shape, dims = op.results[0].type.shape, op.ints("broadcast_dimensions")
    line = [1] * len(shape)
    for size, dim in zip(operands[0].shape, dims, strict=True):
        line[dim] = size
    return np.broadcast_to(operands[0].reshape(line), shape)


def _divided(_: Operator, operands: list[Any]) -> Any:
    left, right = operands
    if np.issubdtype(left.dtype, np.integer):  # toward zero
        return np.sign(left) * np.sign(right) * (np.abs(left) // np.maximum(np.abs(right), 1))
    return left / right


def _selected(_: Operator, operands: list[Any]) -> Any:
    which, *cases = operands
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 and which.dtype == np.bool_ else _refused()


def _reshaped(op: Operator, operands: list[Any]) -> Any:
    return operands[0].reshape(op.results[0].type.shape) if op.attr("dimensions") is None else _refused()


def _refused() -> Any:
    raise _UnknownError


def _by(function: Callable[..., Any]) -> _Compute:
    return lambda _, operands: function(*operands)


_COMPUTED: Mapping[str, _Compute] = MappingProxyType(
    {
        "iota": _iota,
        "broadcast_in_dim": _broadcast,
        "convert_element_type": lambda _, operands: operands[0],
        "div": _divided,
        "integer_pow": lambda op, operands: operands[0] ** op.integer("y"),
        "reduce_sum": lambda op, operands: operands[0].sum(op.ints("axes"), dtype=operands[0].dtype),
        "reshape": _reshaped,
        "select_n": _selected,
        "squeeze": lambda op, operands: operands[0].reshape(op.results[0].type.shape),
        "transpose": lambda op, operands: operands[0].transpose(op.ints("permutation")),
    }
    | {name: _by(getattr(np, name)) for name in ("abs", "sign", "floor", "ceil", "sin", "cos", "exp")}
    | {
        name: _by(function)
        for name, function in (
            ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("neg", np.negative), ("rem", np.fmod),
            ("max", np.maximum), ("min", np.minimum), ("and", np.bitwise_and), ("or", np.bitwise_or),
            ("not", np.invert), ("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal),
            ("gt", np.greater), ("ge", np.greater_equal), ("copy", np.asarray),
        )
    }
)  # fmt: skip


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
