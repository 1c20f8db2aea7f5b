"""Types that common primitives give their results, as far as they follow from operands and attributes.

The rules are those of jax.lax. An elementwise primitive takes operands of one shape, or scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from autopar.ir.graph import Attr, Operator
from autopar.ir.primitives import COMPARISONS, REDUCTIONS, SAME_DTYPE, SAME_SHAPE
from autopar.ir.types import TensorType


def result_problems(op: Operator, operands: tuple[TensorType, ...]) -> Iterator[str]:
    """How the results of an operator disagree with its operands; nothing for a primitive without a rule.

    Args:
        op: the operator.
        operands: types of what it takes.
    """
    rule = _rule(op.primitive)
    if rule is None:
        return
    if len(op.results) != 1:
        yield f"has {len(op.results)} results; {op.primitive} has 1"
        return
    try:
        yield from rule(op, operands, op.results[0].type)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        yield f"its attributes do not fit {', '.join(map(str, operands)) or 'no operands'}: {error}"


_Rule = Callable[[Operator, tuple[TensorType, ...], TensorType], Iterator[str]]


def _rule(primitive: str) -> _Rule | None:
    if primitive in SAME_DTYPE or primitive in COMPARISONS or primitive in SAME_SHAPE:
        return _elementwise
    return _reduce if primitive in REDUCTIONS else _RULES.get(primitive)


def _expect(actual: TensorType, shape: tuple[int, ...], dtype: str | None) -> Iterator[str]:
    wanted = TensorType(shape, dtype or actual.dtype)
    if actual != wanted:
        yield f"its result has type {actual}, not {wanted}"


def _elementwise(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    shapes = sorted({t.shape for t in operands if t.shape})
    whole = _together(shapes)
    if whole is None or not operands:
        yield f"takes shapes that differ: {', '.join(map(str, operands))}"
        return
    dtype = None
    if op.primitive in SAME_DTYPE or op.primitive in COMPARISONS:
        dtypes = sorted({t.dtype for t in operands})
        if len(dtypes) > 1:
            yield f"takes dtypes that differ: {', '.join(map(str, operands))}"
        dtype = "bool" if op.primitive in COMPARISONS else operands[0].dtype
        given = dict(op.attrs).get("out_dtype")
        dtype = given if isinstance(given, str) else dtype
    elif op.primitive == "convert_element_type":
        dtype = str(op.attr("new_dtype"))
    elif op.primitive == "is_finite":
        dtype = "bool"
    elif op.primitive == "select_n":
        dtype = operands[1].dtype
        if any(t.dtype != dtype for t in operands[1:]):
            yield f"chooses among dtypes that differ: {', '.join(map(str, operands[1:]))}"
    yield from _expect(result, whole, dtype)


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of an elementwise result: of equal rank, dims equal or 1; None where they do not go together."""
    if len({len(s) for s in shapes}) > 1:
        return None
    shape = []
    for sizes in zip(*shapes, strict=True):
        longer = {n for n in sizes if n != 1}
        if len(longer) > 1:
            return None
        shape.append(longer.pop() if longer else 1)
    return tuple(shape)


def _reduce(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    axes = _dims(op.ints("axes"), operand.rank)
    shape = tuple(n for d, n in enumerate(operand.shape) if d not in axes)
    given = dict(op.attrs).get("out_dtype")
    yield from _expect(result, shape, given if isinstance(given, str) else operand.dtype)


def _transpose(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    order = _dims(op.ints("permutation"), operand.rank)
    if len(order) != operand.rank:
        yield f"permutation {order} is not one of {operand.rank} dims"
        return
    yield from _expect(result, tuple(operand.shape[d] for d in order), operand.dtype)


def _reshape(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    operand = operands[0]
    if math.prod(op.ints("new_sizes")) != operand.size:
        yield f"{operand} does not have as many elements as {op.ints('new_sizes')}"
    yield from _expect(result, op.ints("new_sizes"), operand.dtype)


def _broadcast(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    operand, shape = operands[0], op.ints("shape")
    dims = _dims(op.ints("broadcast_dimensions"), len(shape))
    if len(dims) != operand.rank or any(n not in (1, shape[d]) for n, d in zip(operand.shape, dims, strict=False)):
        yield f"{operand} does not lie along dims {dims} of {shape}"
    yield from _expect(result, shape, operand.dtype)


def _squeeze(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    (operand,) = operands
    gone = _dims(op.ints("dimensions"), operand.rank)
    if any(operand.shape[d] != 1 for d in gone):
        yield f"squeezes dims {gone} of {operand}, of which some are not 1"
    yield from _expect(result, tuple(n for d, n in enumerate(operand.shape) if d not in gone), operand.dtype)


def _concatenate(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    first = operands[0]
    (dim,) = _dims((op.integer("dimension"),), first.rank)
    rests = sorted({(t.shape[:dim], t.shape[dim + 1 :], t.dtype) for t in operands})
    if len(rests) > 1:
        yield f"joins along dim {dim} what differs elsewhere: {', '.join(map(str, operands))}"
        return
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in operands), *first.shape[dim + 1 :])
    yield from _expect(result, shape, first.dtype)


def _dot_general(op: Operator, operands: tuple[TensorType, ...], result: TensorType) -> Iterator[str]:
    left, right = operands
    summed, batch = (_pair(p) for p in _pair(op.attr("dimension_numbers")))
    left_summed, right_summed, left_batch, right_batch = map(_ints, (*summed, *batch))
    left_gone = _dims((*left_batch, *left_summed), left.rank)
    right_gone = _dims((*right_batch, *right_summed), right.rank)
    sizes = [left.shape[d] for d in left_gone]
    if sizes != [right.shape[d] for d in right_gone] or len(left_batch) != len(right_batch):
        yield f"dims {left_gone} of {left} and {right_gone} of {right} do not have the same sizes"
        return
    shape = (
        *sizes[: len(left_batch)],
        *(n for d, n in enumerate(left.shape) if d not in left_gone),
        *(n for d, n in enumerate(right.shape) if d not in right_gone),
    )
    given = dict(op.attrs).get("preferred_element_type")
    yield from _expect(result, shape, given if isinstance(given, str) else None)


def _pair(value: Attr) -> tuple[Attr, Attr]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{value!r} is not a pair")
    return value


def _ints(value: Attr) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is not a tuple of ints")
    ints = tuple(v for v in value if isinstance(v, int))
    if len(ints) != len(value):
        raise TypeError(f"{value!r} is not a tuple of ints")
    return ints


def _dims(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``dims``, or ValueError unless all are different dims of a tensor of ``rank``."""
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise ValueError(f"{dims} are not different dims below {rank}")
    return dims


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "broadcast_in_dim": _broadcast,
        "concatenate": _concatenate,
        "dot_general": _dot_general,
        "reshape": _reshape,
        "squeeze": _squeeze,
        "transpose": _transpose,
    }
)
