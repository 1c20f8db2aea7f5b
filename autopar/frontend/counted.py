"""Reads and writes at positions that count along a dim: ``logits[jnp.arange(n), labels]``.

Row i of the indices names row i of the operand. Said with batching dims, as `jnp.take_along_axis` says it, the two dims
are seen to be one, which can be split over devices and over microbatches; as indices, the positions could be anything.
jax takes indices out of a loop: `Counting` says in the loop's body how they count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar._compat.jaxprs import plain_params
from autopar.ir import Literal, Operand, Operator, TensorType

_INTEGERS = ("i32", "i64", "u32", "u64")
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Counting:
    """How a value counts 0, 1, 2..

    Args:
        along: the dim along which it does and is the same along all others; None if there is none.
        columns: the same for each place of the last dim by itself; empty where that is not known.
    """

    along: int | None = None
    columns: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class ValueFacts:
    """Facts about the values of a graph under construction.

    Args:
        producers: operator that makes a value, by the value's name.
        types: of values.
        arrays: values that are given: constants and what the function closes over.
        entering: how inputs of a region count, by name.
    """

    producers: Mapping[str, Operator]
    types: Mapping[str, TensorType]
    arrays: Mapping[str, Any]
    entering: Mapping[str, Counting] = field(default_factory=dict)

    def counting(self, operand: Operand) -> Counting:
        """How a value counts."""
        return Counting(self.counts_along(operand), self.columns(operand))

    def columns(self, operand: Operand) -> tuple[int | None, ...]:
        """`Counting.columns` of indices that are joined along their last dim."""
        if isinstance(operand, Literal):
            return ()
        if operand in self.entering:
            return self.entering[operand].columns
        op = self.producers.get(operand)
        if op is None or op.primitive != "concatenate" or any(isinstance(o, Literal) for o in op.operands):
            return ()
        last = op.results[0].type.rank - 1
        if op.integer("dimension") != last or any(self.shape(o)[last] != 1 for o in op.operands):
            return ()
        dims = [self.counts_along(o) for o in op.operands]
        return tuple(None if dim == last else dim for dim in dims)

    def counts_along(self, operand: Operand) -> int | None:
        """`Counting.along` of a value."""
        if isinstance(operand, Literal):
            return None
        if operand in self.entering:
            return self.entering[operand].along
        if operand in self.arrays:
            return _counting_dim(self.arrays[operand])
        op = self.producers.get(operand)
        if op is None or op.results[0].type.dtype not in _INTEGERS:
            return None
        shape = op.results[0].type.shape
        match op.primitive:
            case "iota":
                return op.integer("dimension")
            case "convert_element_type" | "copy":
                return self.counts_along(op.operands[0])
            case "broadcast_in_dim":
                dim = self.counts_along(op.operands[0])
                to = None if dim is None else op.ints("broadcast_dimensions")[dim]
                return to if to is not None and self.shape(op.operands[0])[dim or 0] == shape[to] else None
            case "reshape":
                return self._reshaped(op)
            case "select_n":
                return self._not_negative(op)
        return None

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """Shape of a value."""
        if isinstance(operand, Literal):
            return operand.type.shape
        known = self.types.get(operand)
        return tuple(self.arrays[operand].shape) if known is None else known.shape

    def _reshaped(self, op: Operator) -> int | None:
        """Through a reshape that only adds or takes away dims of 1."""
        dim = self.counts_along(op.operands[0])
        if dim is None or op.attr("dimensions") is not None:
            return None
        before, after = self.shape(op.operands[0]), op.results[0].type.shape
        long = [d for d, n in enumerate(before) if n != 1]
        moved = [d for d, n in enumerate(after) if n != 1]
        if [before[d] for d in long] != [after[d] for d in moved] or dim not in long:
            return None
        return moved[long.index(dim)]

    def _not_negative(self, op: Operator) -> int | None:
        """Through ``where(i < 0, i + n, i)``, by which jax.numpy reads negative indices from the end."""
        which, kept = op.operands[:2]
        if isinstance(which, str) and which in self.arrays:  # of a numpy array jax.numpy tests at once
            return None if _is_any(self.arrays[which]) else self.counts_along(kept)
        test = self.producers.get(which) if isinstance(which, str) else None
        if test is None or test.primitive != "lt" or test.operands[0] != kept:
            return None
        zero = test.operands[1]
        return self.counts_along(kept) if isinstance(zero, Literal) and zero.is_zero else None


def _readable(array: Any) -> bool:
    """Whether the values of a given array can be looked at here, at little cost."""
    return (
        not isinstance(array, jax.core.Tracer)
        and array.size <= _LARGEST
        and getattr(array, "is_fully_addressable", True)
    )


def _is_any(array: Any) -> bool:
    """Whether some element is true, or may be."""
    return not _readable(array) or bool(np.any(np.asarray(array)))


def _counting_dim(array: Any) -> int | None:
    if not jax.numpy.issubdtype(array.dtype, np.integer) or not _readable(array):
        return None
    values = np.asarray(array)
    for dim, n in enumerate(values.shape):
        if n > 1:
            line = np.arange(n).reshape([n if d == dim else 1 for d in range(values.ndim)])
            if np.array_equal(values, np.broadcast_to(line, values.shape)):
                return dim
    return None


@dataclass(frozen=True)
class Batched:
    """A read or write with batching dims.

    Args:
        params: of the equation.
        columns: places of the last dim of the indices that are still read.
    """

    params: Mapping[str, Any]
    columns: tuple[int, ...]


def is_indexed(primitive: str) -> bool:
    """Whether a primitive reads or writes at given positions."""
    return primitive == "gather" or primitive.startswith("scatter")


def batched(
    primitive: str, params: Mapping[str, Any], operands: Sequence[Operand], facts: ValueFacts
) -> Batched | None:
    """The same read or write with batching dims for indices that count; None where none does.

    Args:
        primitive: one of which `is_indexed` is true.
        params: of the equation.
        operands: the array, the indices, and the updates of a write.
        facts: about values.
    """
    columns = facts.columns(operands[1])
    if not any(row is not None for row in columns) or not isinstance(operands[0], str):
        return None
    reads = primitive == "gather"
    numbers = params["dimension_numbers"]
    picked = list(numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims)
    single = numbers.collapsed_slice_dims if reads else numbers.inserted_window_dims
    rows = list(numbers.start_indices_batching_dims if reads else numbers.scatter_indices_batching_dims)
    pairs = list(zip(numbers.operand_batching_dims, rows, strict=True))
    shape, indices = facts.shape(operands[0]), facts.shape(operands[1])
    kept: list[int] = []
    for n, row in enumerate(columns):
        dim = picked[n]
        if row is None or row in rows or dim not in single or shape[dim] != indices[row]:
            kept.append(n)
            continue
        pairs.append((dim, row))
        rows.append(row)
    if len(kept) == len(columns) or not kept:
        return None
    pairs.sort()
    dims = tuple(d for d, _ in pairs)
    collapsed = tuple(d for d in single if d not in dims)
    common = {"operand_batching_dims": dims}
    numbered: Any
    if reads:
        numbered = jax.lax.GatherDimensionNumbers(
            offset_dims=numbers.offset_dims,
            collapsed_slice_dims=collapsed,
            start_index_map=tuple(picked[n] for n in kept),
            start_indices_batching_dims=tuple(r for _, r in pairs),
            **common,
        )
    else:
        numbered = jax.lax.ScatterDimensionNumbers(
            update_window_dims=numbers.update_window_dims,
            inserted_window_dims=collapsed,
            scatter_dims_to_operand_dims=tuple(picked[n] for n in kept),
            scatter_indices_batching_dims=tuple(r for _, r in pairs),
            **common,
        )
    changed = {**params, "dimension_numbers": numbered, "indices_are_sorted": False}
    return Batched(changed, tuple(kept))


def entering_regions(primitive: str, params: Mapping[str, Any], given: Sequence[Counting]) -> dict[str, list[Counting]]:
    """How the first inputs of a loop's or branch's regions count, by region: what is the same in every trip.

    Args:
        primitive: of the equation.
        params: of the equation.
        given: how its operands count.
    """
    match primitive:
        case "scan":
            return {"body": list(given[: plain_params(primitive, params)["num_consts"]])}
        case "while":
            first, more = params["cond_nconsts"], params["body_nconsts"]
            return {"cond": list(given[:first]), "body": list(given[first : first + more])}
        case "cond":
            return {str(n): list(given[1:]) for n in range(len(params["branches"]))}
    return {}
