"""Rules of primitives that pass each operand on as the result of the same index."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, Rule, RuleFunction

# A remat's barrier may hold every parameter of the model; strategies grow with factors ** mesh axes.
_MOST_FACTORS = 16


def passed_on(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Result i is operand i. Operands of one shape share factors, so that they can be split together.

    Of many shapes the largest get factors and the rest stay whole. Not linear here: which operands are
    partial together would be a choice for each of them.
    """
    if tuple(v.type for v in op.results) != operand_types:
        return None
    shapes = sorted({t.shape: t.nbytes for t in operand_types}.items(), key=lambda item: (-item[1], item[0]))
    factors: list[Factor] = []
    first: dict[tuple[int, ...], int] = {}
    for shape, _ in shapes:
        if len(factors) + len(shape) <= _MOST_FACTORS:
            first[shape] = len(factors)
            factors.extend(Factor(n) for n in shape)
    labels = tuple(
        tuple(range(first[t.shape], first[t.shape] + t.rank)) if t.shape in first else (None,) * t.rank
        for t in operand_types
    )
    return Rule(tuple(factors), labels, labels)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {"device_put": passed_on, "optimization_barrier": passed_on, "stage_boundary": passed_on, "wire": passed_on}
)
