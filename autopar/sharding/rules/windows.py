"""Rules of sliding windows: dims over which no window slides are factors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Rule, RuleFunction
from autopar.sharding.loops import parallel, rule_of
from autopar.sharding.rules.elementwise import is_number


def _still(op: Operator) -> list[int]:
    """Dims with a window of 1, a step of 1, no padding and no dilation: every element is its own window."""
    attrs = dict(op.attrs)
    window = op.ints("window_dimensions")
    ones = (1,) * len(window)
    strides = op.ints("window_strides")
    dilation = op.ints("base_dilation") if "base_dilation" in attrs else ones
    padding = attrs["padding"]
    if not isinstance(padding, tuple) or len(padding) != len(window):
        raise ValueError(f"padding of {op.id} is {padding}")
    return [d for d in range(len(window)) if (window[d], strides[d], dilation[d]) == (1, 1, 1) and padding[d] == (0, 0)]


def _windowed(op: Operator, operand_types: tuple[TensorType, ...], linear: bool) -> Rule | None:
    """Still dims are factors of every tensor that is not a scalar. ``linear``: in operand 0."""
    types = (*operand_types, *(v.type for v in op.results))
    full = [i for i, t in enumerate(types) if t.rank]
    rank = len(op.ints("window_dimensions"))
    still = _still(op)
    if any(types[i].rank != rank for i in full):
        return None
    if not full or any(len({types[i].shape[d] for i in full}) != 1 for d in still):
        return None
    loops = [parallel(types[full[0]].shape[d], *((i, d) for i in full)) for d in still]
    return rule_of(loops, op, operand_types, ((0,),) if linear and is_number(operand_types[0].dtype) else ())


def plain(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Largest and smallest of a window, windows with a function of the user."""
    return _windowed(op, operand_types, False)


def sums(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Sums of windows, and gradients and tangents of their largest element: linear in operand 0."""
    return _windowed(op, operand_types, True)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "reduce_window": plain,
        "reduce_window_max": plain,
        "reduce_window_min": plain,
        "reduce_window_sum": sums,
        "select_and_gather_add": sums,
        "select_and_scatter": plain,
        "select_and_scatter_add": sums,
    }
)
