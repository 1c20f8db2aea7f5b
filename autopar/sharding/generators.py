"""Operators whose result can be made on each device in whatever layout is asked for."""

from __future__ import annotations

from autopar.ir import Literal, Operator

_NAMES = frozenset({"iota", "constant"})


def is_generator(op: Operator) -> bool:
    """Whether the operator holds no data that would have to move: a filled array, a range, a constant."""
    if op.effects or op.regions:
        return False
    if op.primitive == "broadcast_in_dim":
        return len(op.operands) == 1 and isinstance(op.operands[0], Literal)
    return op.primitive in _NAMES and not op.operands


def is_zero(op: Operator) -> bool:
    """Whether a generator makes zeros only."""
    return op.primitive == "broadcast_in_dim" and isinstance(op.operands[0], Literal) and op.operands[0].is_zero
