"""`is_causal`: whether no token sees a later one, from what lies between scores and softmax.

The region is run on what is known of values where a key comes after the row that asks, and where it is the row's own:
scores must come out as a number that leaves nothing of them after the exponential in the first case, and as they are
in the second. So an exponential of the first kind is 0, for the row's largest score is no fill. Where the fill is minus
infinity the second case does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from autopar.ir.blockwise.spec import MOVES, SAME, labels_of
from autopar.ir.graph import Graph, Literal, Operand, Operator

# What counts as a fill: no score is so low.
_FILL = -1e9


@dataclass(frozen=True)
class _Position:
    """``rows`` times the row's position, ``keys`` times the key's, and ``more``; a number where both are 0."""

    rows: float = 0.0
    keys: float = 0.0
    more: float = 0.0

    @property
    def number(self) -> float | None:
        """The number that it is everywhere; None of a position."""
        return self.more if not self.rows and not self.keys else None


#: "score": a number that is no fill; "fill": one; "never": minus infinity; "unsure": any; "either": a truth value.
_Known: TypeAlias = "_Position | bool | str"


def is_causal(region: Graph, rows: int, keys: int) -> bool:
    """Whether the softmax of a core is over earlier keys and the row's own.

    Args:
        region: from the product of queries and keys to what the softmax is of.
        rows: number of the loop over tokens that ask.
        keys: of the loop over keys, as many.
    """
    later, same = (_run(region, rows, keys, distance) for distance in ((-math.inf, -1.0), (0.0, 0.0)))
    return later == "never" or (later == "fill" and same == "score")


def _run(region: Graph, rows: int, keys: int, distance: tuple[float, float]) -> _Known:
    """Result of the region where a row's position less the key's is within ``distance``."""
    env: dict[str, _Known] = {}
    scores = region.inputs[0].name
    for i in region.inputs:
        env[i.name] = "score" if i.name == scores else "either" if i.type.dtype == "bool" else "unsure"

    def of(operand: Operand) -> _Known:
        if not isinstance(operand, Literal):
            return env[operand]
        if operand.text in ("True", "False"):
            return operand.text == "True"
        return _Position(more=float(operand.text)) if operand.type.dtype[0] != "c" else "unsure"

    for op in region.operators:
        (result,) = op.results
        env[result.name] = _made(op, [of(o) for o in op.operands], (rows, keys), distance)
    return _as_score(env[str(region.outputs[0].operand)])


def _made(op: Operator, given: list[_Known], loops: tuple[int, int], distance: tuple[float, float]) -> _Known:
    """Facts about an operator's result, from those about its operands."""
    name = op.primitive
    if name == "iota":
        return _iota(op, loops)
    if name == "convert_element_type" and op.results[0].type.dtype != "bool":
        (only,) = given
        return _Position(more=float(only)) if isinstance(only, bool) else "unsure" if only == "either" else only
    if (name in MOVES or name in SAME) and len(given) == 1 and not _narrowed(op, given[0]):
        return given[0]
    if name == "select_n":
        return _selected(given)
    if name in _LOGIC:
        return _LOGIC[name]([g if isinstance(g, bool) else None for g in given])
    if name in _COMPARED and len(given) == 2:
        return _compared(name, given, distance)
    if op.results[0].type.dtype == "bool":
        return "either"
    result = _ARITHMETIC[name](given) if name in _ARITHMETIC else None
    if result is not None:
        return result
    return "score" if all(_as_score(g) == "score" for g in given) and name not in ("log", "div") else "unsure"


def _narrowed(op: Operator, known: _Known) -> bool:
    """Whether numbers become truth values."""
    return op.results[0].type.dtype == "bool" and not isinstance(known, bool) and known != "either"


def _iota(op: Operator, loops: tuple[int, int]) -> _Known:
    loop = labels_of(op)[op.integer("dimension")]
    return _Position(rows=1.0) if loop == loops[0] else _Position(keys=1.0) if loop == loops[1] else "unsure"


def _as_score(known: _Known) -> str:
    """A value read as a score."""
    if isinstance(known, _Position):
        number = known.number
        if number is None:
            return "unsure"
        return "never" if number == -math.inf else "fill" if number <= _FILL else "score" if number < 1e6 else "unsure"
    return "unsure" if isinstance(known, bool) else known


def _selected(given: list[_Known]) -> _Known:
    which, *cases = given
    if isinstance(which, bool) and len(cases) == 2:
        return cases[which]
    same = {_as_score(c) for c in cases}
    return same.pop() if len(same) == 1 and all(not isinstance(c, bool) and c != "either" for c in cases) else "unsure"


def _and(given: list[bool | None]) -> _Known:
    return False if False in given else True if None not in given else "either"


def _or(given: list[bool | None]) -> _Known:
    return True if True in given else False if None not in given else "either"


def _not(given: list[bool | None]) -> _Known:
    (only,) = given
    return "either" if only is None else not only


def _compared(name: str, given: list[_Known], distance: tuple[float, float]) -> _Known:
    """A comparison of positions, by the range that their difference has."""
    a, b = given
    if not isinstance(a, _Position) or not isinstance(b, _Position):
        return "either"
    difference = _sum(a, b, -1.0)
    if difference.rows + difference.keys != 0.0:
        return "either"
    ends = [difference.more + (difference.rows * d if difference.rows else 0.0) for d in distance]
    low, high = min(ends), max(ends)
    always, never = _COMPARED[name]
    return True if always(low, high) else False if never(low, high) else "either"


def _sum(a: _Position, b: _Position, sign: float = 1.0) -> _Position:
    return _Position(a.rows + sign * b.rows, a.keys + sign * b.keys, a.more + sign * b.more)


def _added(given: list[_Known]) -> _Known | None:
    if len(given) != 2:
        return None
    a, b = given
    if isinstance(a, _Position) and isinstance(b, _Position):
        return _sum(a, b)
    kinds = {_as_score(a), _as_score(b)}
    if "never" in kinds:
        return "never"  # what would not be is infinite, and spoils the step anyway
    return "fill" if kinds <= {"fill", "score"} and "fill" in kinds else None


def _subtracted(given: list[_Known]) -> _Known | None:
    a, b = given
    if isinstance(a, _Position) and isinstance(b, _Position):
        return _sum(a, b, -1.0)
    return _added([a, replace(b, more=-b.more)]) if isinstance(b, _Position) and b.number is not None else None


def _multiplied(given: list[_Known]) -> _Known | None:
    numbers = [g.number for g in given if isinstance(g, _Position) and g.number is not None]
    others = [g for g in given if not isinstance(g, _Position) or g.number is None]
    if len(given) != 2 or not numbers:
        return None
    by = numbers[0]
    if not others:
        product = numbers[0] * numbers[1]
        return None if math.isnan(product) else _Position(more=product)
    (other,) = others
    if isinstance(other, _Position):
        return _Position(by * other.rows, by * other.keys, by * other.more) if math.isfinite(by) else None
    if other == "score" and math.isfinite(by):
        return "score"
    return other if by > 0.0 and (other == "never" or (other == "fill" and by >= 1.0)) else None


def _divided(given: list[_Known]) -> _Known | None:
    number = given[1].number if isinstance(given[1], _Position) else None
    return _multiplied([given[0], _Position(more=1.0 / number)]) if number else None


def _negative(given: list[_Known]) -> _Known | None:
    return _multiplied([given[0], _Position(more=-1.0)])


_LOGIC: Mapping[str, Callable[[list[bool | None]], _Known]] = MappingProxyType({"and": _and, "or": _or, "not": _not})
#: Whether a comparison with 0 always holds of what lies between two numbers, and whether it never does.
_Range: TypeAlias = Callable[[float, float], bool]
_COMPARED: Mapping[str, tuple[_Range, _Range]] = MappingProxyType(
    {
        "ge": (lambda low, high: low >= 0.0, lambda low, high: high < 0.0),
        "gt": (lambda low, high: low > 0.0, lambda low, high: high <= 0.0),
        "le": (lambda low, high: high <= 0.0, lambda low, high: low > 0.0),
        "lt": (lambda low, high: high < 0.0, lambda low, high: low >= 0.0),
        "eq": (lambda low, high: low == high == 0.0, lambda low, high: high < 0.0 or low > 0.0),
        "ne": (lambda low, high: high < 0.0 or low > 0.0, lambda low, high: low == high == 0.0),
    }
)
_ARITHMETIC: Mapping[str, Callable[[list[_Known]], _Known | None]] = MappingProxyType(
    {
        "add": _added,
        "add_any": _added,
        "sub": _subtracted,
        "mul": _multiplied,
        "div": _divided,
        "neg": _negative,
    }
)
