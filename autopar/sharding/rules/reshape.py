"""The rule of ``reshape``: dims that split or merge share a factor at their major end.

Row-major order makes it work: where the dims (a0, a1, ..) become (b0, b1, ..) with the same product, cutting
a0 into n even shards cuts the elements into n even runs, and so does cutting b0, if n divides both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, Rule, RuleFunction
from autopar.sharding.rules.elementwise import is_number

Shape: TypeAlias = tuple[int, ...]


def groups(source: Shape, target: Shape) -> tuple[tuple[Shape, Shape], ...]:
    """Runs of dims of ``source`` and of ``target`` with equal products, as short as can be, left to right.

    Args:
        source: shape before.
        target: shape after, of as many elements; none of them 0.

    Dims of size 1 are in no group: they may stand anywhere.
    """
    left = [d for d, n in enumerate(source) if n != 1]
    right = [d for d, n in enumerate(target) if n != 1]
    groups_of: list[tuple[Shape, Shape]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        size_a, size_b = source[a[0]], target[b[0]]
        while size_a != size_b:
            if size_a < size_b:
                a.append(left.pop(0))
                size_a *= source[a[-1]]
            else:
                b.append(right.pop(0))
                size_b *= target[b[-1]]
        groups_of.append((tuple(a), tuple(b)))
    return tuple(groups_of)


def reshape(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Each group of dims is a factor of size gcd(major dim before, major dim after). Linear."""
    (type,) = operand_types
    target = op.results[0].type.shape
    if op.attr("dimensions") is not None or type.size == 0:
        return None
    labels: list[int | None] = [None] * type.rank
    result: list[int | None] = [None] * len(target)
    factors: list[Factor] = []
    for before, after in groups(type.shape, target):
        labels[before[0]] = result[after[0]] = len(factors)
        factors.append(Factor(math.gcd(type.shape[before[0]], target[after[0]])))
    linear = ((0,),) if is_number(type.dtype) else ()
    return Rule(tuple(factors), (tuple(labels),), (tuple(result),), linear)


RULES: Mapping[str, RuleFunction] = MappingProxyType({"reshape": reshape})
