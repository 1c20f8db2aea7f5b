"""Loops of attention as labels of dims, carried through operators that keep or move dims."""

from __future__ import annotations

from typing import TypeAlias

from autopar.ir.graph import Operator
from autopar.ir.primitives import ELEMENTWISE, is_fusible, is_generator
from autopar.ir.types import TensorType

#: By dim its loop; None where it has one element, or the value is the same along it.
Labels: TypeAlias = tuple[int | None, ...]

#: What keeps every value as it is, but for its dtype.
SAME = frozenset({"convert_element_type", "copy", "stop_gradient", "reduce_precision"})
#: What keeps every element where it is.
IN_PLACE = ELEMENTWISE | SAME
#: What moves dims, or adds some of one element.
MOVES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"})


def moved(op: Operator, type: TensorType, labels: Labels) -> Labels | None:
    """Labels of the result of an operator of `MOVES`, from those of its operand; None where dims are joined."""
    result = op.results[0].type
    if op.primitive == "transpose":
        return tuple(labels[d] for d in op.ints("permutation"))
    if op.primitive == "broadcast_in_dim":
        by_dim: dict[int, int | None] = {}
        for at, label, n in zip(op.ints("broadcast_dimensions"), labels, type.shape, strict=True):
            by_dim[at] = label if n == result.shape[at] else None
        return tuple(by_dim.get(d) for d in range(result.rank))
    pairs = [(n, label) for n, label in zip(type.shape, labels, strict=True) if n != 1]
    if [n for n, _ in pairs] != [n for n in result.shape if n != 1]:
        return None
    left = iter(label for _, label in pairs)
    return tuple(None if n == 1 else next(left) for n in result.shape)


def before(op: Operator, type: TensorType, labels: Labels) -> Labels | None:
    """Labels of the operand of an operator of `MOVES`, from those of its result."""
    result = op.results[0].type
    if op.primitive == "transpose":
        order = op.ints("permutation")
        return tuple(labels[order.index(d)] for d in range(len(order)))
    if op.primitive == "broadcast_in_dim":
        at = op.ints("broadcast_dimensions")
        return tuple(None if n == 1 else labels[d] for d, n in zip(at, type.shape, strict=True))
    left = iter(label for n, label in zip(result.shape, labels, strict=True) if n != 1)
    if [n for n in result.shape if n != 1] != [n for n in type.shape if n != 1]:
        return None
    return tuple(None if n == 1 else next(left) for n in type.shape)


def unified(a: Labels, b: Labels) -> Labels | None:
    """Labels of two values of one rank together; None where a dim is another loop."""
    if len(a) != len(b) or any(x is not None and y is not None and x != y for x, y in zip(a, b, strict=True)):
        return None
    both = tuple(y if x is None else x for x, y in zip(a, b, strict=True))
    known = [x for x in both if x is not None]
    return both if len(known) == len(set(known)) else None


def is_positional(op: Operator) -> bool:
    """Whether a block of the result of an operator is made of blocks of its operands, and of where the block is."""
    if op.effects or op.regions or len(op.results) != 1 or op.primitive == "constant":
        return False
    return is_generator(op) or (is_fusible(op) and op.primitive in IN_PLACE | MOVES)
