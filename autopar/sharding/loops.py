"""`FactorPlaces`: a factor with the dims that it labels, from which a `Rule` is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, Rule


@dataclass(frozen=True, slots=True)
class FactorPlaces:
    """A factor and where it is.

    Args:
        factor: the factor.
        places: (tensor, dim) pairs that it labels; tensors are numbered operands first, then results.
    """

    factor: Factor
    places: tuple[tuple[int, int], ...]


def parallel(size: int, *places: tuple[int, int]) -> FactorPlaces:
    """A loop of ``size`` that every result has."""
    return FactorPlaces(Factor(size), places)


def rule_of(
    loops: Sequence[FactorPlaces],
    op: Operator,
    operand_types: tuple[TensorType, ...],
    linear: tuple[tuple[int, ...], ...] = (),
) -> Rule:
    """The rule of an operator with ``loops``; those of size 1 or 0 are left out, since nothing can split them.

    Args:
        loops: its loops, in the order that its factors get.
        op: the operator.
        operand_types: types of its operands.
        linear: as in `Rule`.
    """
    kept = [loop for loop in loops if loop.factor.size > 1]
    labels: list[list[int | None]] = [[None] * t.rank for t in (*operand_types, *(v.type for v in op.results))]
    for index, loop in enumerate(kept):
        for tensor, dim in loop.places:
            labels[tensor][dim] = index
    dims = [tuple(labelled) for labelled in labels]
    count = len(operand_types)
    return Rule(tuple(loop.factor for loop in kept), tuple(dims[:count]), tuple(dims[count:]), linear)
