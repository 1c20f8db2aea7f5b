"""`Fact`: what is known of a value that no data decides: numbers, positions, masks.

A mask is proven causal without its elements: ``iota_i + c >= iota_j`` is a comparison of affine functions of the
positions, whose extremes over all pairs of a position and a later one are at the corners of a triangle. `combined`
gives the kind of later entries of scores that an operator makes, from the kinds of its operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.ir import Literal, Operator, TensorType
from autopar.ir.primitives import COMPARISONS
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
    """The class of a number: "zero", "one", "low" or "high" as masks have them, else "any"; a truth value is 0 or 1."""
    if value in (0, 1):
        return "one" if value else "zero"
    return "low" if value <= -MASKED else "high" if value >= MASKED else "any"


def combined(op: Operator, fills: Sequence[Fill]) -> Fill:
    """Class ("zero", "one", "low", ...) of the result of an elementwise operator, from those of its operands.

    Args:
        op: an operator.
        fills: classes of its operands.
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


_SAME = frozenset({"convert_element_type", "copy", "optimization_barrier", "reduce_precision", "stop_gradient"})


@dataclass(frozen=True)
class Fact:
    """Known elements of a value that does not depend on the batch, as of a causal mask.

    Args:
        slope: by dim how much an element is larger than the one before; None: it is no affine function of positions.
        base: the first element, where ``slope`` is known.
        fills: by (dim, other dim) the value of all elements above the diagonal of the two: "zero", "low", ...
    """

    slope: tuple[float, ...] | None = None
    base: float = 0.0
    fills: tuple[tuple[tuple[int, int], Fill], ...] = ()

    def fill(self, rows: int | None, keys: int | None) -> Fill:
        """Value of all elements whose position in ``keys`` is later than in ``rows``; dims that it lacks are None."""
        if self.slope is not None and not any(self.slope):
            return fill_of_number(self.base)
        return "any" if rows is None or keys is None else dict(self.fills).get((rows, keys), "any")


def fact_of_literal(literal: Literal) -> Fact | None:
    """The fact of a number; None of a complex one."""
    text = literal.text
    if text in ("True", "False"):
        return Fact((), float(text == "True"))
    try:
        return Fact((), float(text))
    except ValueError:
        return None


def fact_of(op: Operator, types: Sequence[TensorType], known: Sequence[Fact | None], tokens: int) -> Fact | None:
    """Facts about the only result of ``op``, from those about its operands.

    Args:
        op: an operator.
        types: of its operands.
        known: facts of its operands.
        tokens: positions of a sequence.
    """
    if len(op.results) != 1 or op.regions or op.effects:
        return None
    result = op.results[0].type
    if op.primitive == "iota":
        return Fact(tuple(float(d == op.integer("dimension")) for d in range(result.rank)))
    if not known or all(k is None for k in known):
        return None
    dims = _moved(op, types[0], result)
    if dims is not None or op.primitive in _SAME:
        return _carried(op, known[0], dims or {d: d for d in range(result.rank)}, result)
    if any(t.rank not in (0, result.rank) for t in types):
        return None
    aligned = [None if k is None else _widened(k, t, result) for k, t in zip(known, types, strict=True)]
    return _affine(op, aligned, result) or _filled(op, aligned, result, tokens)


def _moved(op: Operator, type: TensorType, result: TensorType) -> dict[int, int] | None:
    """Operand dim -> result dim of an operator that moves dims; those that it stretches or drops are left out."""
    if op.primitive == "broadcast_in_dim":
        placed = op.ints("broadcast_dimensions")
        return {d: r for d, r in enumerate(placed) if type.shape[d] == result.shape[r]}
    if op.primitive == "transpose":
        return {d: r for r, d in enumerate(op.ints("permutation"))}
    if op.primitive in ("reshape", "squeeze", "expand_dims"):
        before = [d for d, n in enumerate(type.shape) if n != 1]
        after = [d for d, n in enumerate(result.shape) if n != 1]
        if [type.shape[d] for d in before] == [result.shape[d] for d in after]:
            return dict(zip(before, after, strict=True))
    return None


def _carried(op: Operator, fact: Fact | None, dims: Mapping[int, int], result: TensorType) -> Fact | None:
    if fact is None:
        return None
    slope: tuple[float, ...] | None = None
    if fact.slope is not None and all(d in dims or not s for d, s in enumerate(fact.slope)):
        by_dim = {dims[d]: s for d, s in enumerate(fact.slope) if d in dims}
        slope = tuple(by_dim.get(r, 0.0) for r in range(result.rank))
    fills = tuple(((dims[q], dims[k]), fill) for (q, k), fill in fact.fills if q in dims and k in dims)
    if op.primitive == "convert_element_type":
        fills = tuple((pair, combined(op, [fill])) for pair, fill in fills)
        if slope is not None and any(slope) and result.dtype == "bool":
            slope = None
    return Fact(slope, fact.base, fills) if slope is not None or fills else None


def _widened(fact: Fact, type: TensorType, result: TensorType) -> Fact:
    """The fact of a scalar next to an array, or of an array with dims of one element."""
    if type.rank == result.rank or fact.slope is None:
        return fact
    return Fact((0.0,) * result.rank, fact.base)


def _affine(op: Operator, known: Sequence[Fact | None], result: TensorType) -> Fact | None:
    """Sums and multiples of affine functions, and choices between equal ones."""
    if op.primitive == "select_n":
        cases = {k for k in known[1:] if k is not None and k.slope is not None}
        return cases.pop() if len(cases) == 1 and None not in known[1:] else None
    pairs = [(k.slope, k.base) for k in known if k is not None and k.slope is not None]
    if len(pairs) != len(known) or result.dtype == "bool":
        return None
    slopes, bases = [p[0] for p in pairs], [p[1] for p in pairs]
    if op.primitive in ("add", "add_any"):
        return Fact(tuple(map(sum, zip(*slopes, strict=True))), sum(bases))
    if op.primitive == "sub":
        return Fact(tuple(a - b for a, b in zip(*slopes, strict=True)), bases[0] - bases[1])
    if op.primitive == "neg":
        return Fact(tuple(-a for a in slopes[0]), -bases[0])
    if op.primitive == "mul" and not all(map(any, slopes)):
        constant = 0 if not any(slopes[0]) else 1
        factor = bases[constant]
        return Fact(tuple(factor * a for a in slopes[1 - constant]), factor * bases[1 - constant])
    return None


def _filled(op: Operator, known: Sequence[Fact | None], result: TensorType, tokens: int) -> Fact | None:
    """Masks: comparisons of positions, and what is done to them element by element."""
    long = [d for d, n in enumerate(result.shape) if n == tokens]
    fills: list[tuple[tuple[int, int], Fill]] = []
    for rows, keys in ((a, b) for a in long for b in long if a != b):
        fill: Fill = "any"
        if op.primitive in COMPARISONS:
            fill = _compared(op, known, rows, keys, tokens)
        if fill == "any":
            fill = combined(op, ["any" if k is None else k.fill(rows, keys) for k in known])
        if fill != "any":
            fills.append(((rows, keys), fill))
    return Fact(fills=tuple(fills)) if fills else None


def _compared(op: Operator, known: Sequence[Fact | None], rows: int, keys: int, tokens: int) -> Fill:
    """The result of comparing two affine functions, for every position and a later one."""
    left, right = known
    if left is None or right is None or left.slope is None or right.slope is None or tokens < 2:
        return "any"
    slope = [a - b for a, b in zip(left.slope, right.slope, strict=True)]
    if any(s for d, s in enumerate(slope) if d not in (rows, keys)):
        return "any"
    corners = [(0, 1), (0, tokens - 1), (tokens - 2, tokens - 1)]
    values = [slope[rows] * i + slope[keys] * j + left.base - right.base for i, j in corners]
    low, high = min(values), max(values)
    always, never = {
        "ge": (low >= 0, high < 0),
        "gt": (low > 0, high <= 0),
        "le": (high <= 0, low > 0),
        "lt": (high < 0, low >= 0),
        "eq": (low == high == 0, low > 0 or high < 0),
        "ne": (low > 0 or high < 0, low == high == 0),
    }[op.primitive]
    return "one" if always else "zero" if never else "any"
