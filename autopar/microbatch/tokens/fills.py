"""Kinds of later entries of scores: the kind of a result, from the kinds of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.ir import Operator
from autopar.microbatch.tokens.states import Fill

#: A mask adds or chooses a number at least as far from 0 where it leaves scores out. A softmax gives it the weight 0
#: unless all scores of a row are as far.
MASKED = 1e4

_MOVES = frozenset(
    {
        "broadcast_in_dim", "copy", "expand_dims", "name", "optimization_barrier", "reduce_max", "reduce_min",
        "reduce_precision", "reshape", "slice", "squeeze", "stop_gradient", "transpose", "wire",
    }
)  # fmt: skip
_KEEP_ZERO = frozenset(
    {
        "abs", "asin", "asinh", "atan", "atanh", "cbrt", "erf", "erf_inv", "expm1", "imag", "log1p", "neg", "real",
        "reduce_sum", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
    }
)  # fmt: skip
_OPPOSITE: Mapping[Fill, Fill] = MappingProxyType({"low": "high", "high": "low", "zero": "zero"})
_NOT: Mapping[Fill, Fill] = MappingProxyType({"one": "zero", "zero": "one"})


def fill_of_number(value: float) -> Fill:
    """The kind of a number; a truth value is 0 or 1."""
    if value in (0, 1):
        return "one" if value else "zero"
    return "low" if value <= -MASKED else "high" if value >= MASKED else "any"


def combined(op: Operator, fills: Sequence[Fill]) -> Fill:
    """The kind of the result of an operator that treats entries one by one.

    Args:
        op: an operator.
        fills: the kinds of its operands.
    """
    name, first = op.primitive, fills[0]
    if name in _MOVES or name in ("convert_element_type", "max", "min", "concatenate", "or", "and"):
        absorbing: Mapping[str, Fill] = {"and": "zero", "or": "one", "min": "low", "max": "high"}
        if absorbing.get(name) in fills:
            return absorbing[name]
        return first if len(set(fills)) == 1 else "any"
    if name in ("mul", "dot_general"):
        return _multiplied(fills, scalar=name == "mul")
    if name in ("add", "add_any", "sub"):
        return _added(name, fills)
    if name in ("div", "rem"):
        return "zero" if first == "zero" else "any"
    if name in ("exp", "exp2", "logistic"):
        return "zero" if first == "low" else "any"
    if name == "select_n":
        return _selected(fills)
    if name in ("eq", "ne") and "any" not in fills and not {"low", "high"}.intersection(fills):
        return "one" if (len(set(fills)) == 1) == (name == "eq") else "zero"
    if name in ("not", "neg"):
        return (_NOT if name == "not" else _OPPOSITE).get(first, "any")
    if name == "integer_pow":
        power = op.attr("y")
        return "zero" if first == "zero" and isinstance(power, int) and power > 0 else "any"
    return "zero" if name in _KEEP_ZERO and first == "zero" else "any"


def _multiplied(fills: Sequence[Fill], scalar: bool) -> Fill:
    if "zero" in fills:
        return "zero"
    if scalar and "one" in fills:
        return fills[1 - fills.index("one")]
    return "any"


def _added(name: str, fills: Sequence[Fill]) -> Fill:
    left, right = fills
    if name == "sub":
        if left == right == "one":
            return "zero"
        if right == "one":
            return left if left in ("low", "high") else "any"
        right = _OPPOSITE.get(right, "any")
    if right == "zero" or left == "zero":
        return left if right == "zero" else right
    for kind in (left, right):
        if kind in ("low", "high") and _OPPOSITE[kind] not in (left, right):
            return kind
    return "any"


def _selected(fills: Sequence[Fill]) -> Fill:
    """A choice: of the first case where the predicate is false, of the second where it is true."""
    predicate, *cases = fills
    if predicate in ("zero", "one") and len(cases) == 2:
        return cases[int(predicate == "one")]
    return cases[0] if len(set(cases)) == 1 else "any"
