"""`Rule`: which dims of an operator's operands and results may be split together.

A factor is a loop of the operator: ``bij,bjk->bik`` has the factors b, i, j, k. Splitting a factor
over a mesh axis splits every dim that it labels. A rule is what a per-primitive function says of one
operator; `autopar.sharding.strategies` turns it into the list of strategies on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir import Operator, TensorType
from autopar.sharding.halo import Halo
from autopar.sharding.ring import Travel

Dims: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop of an operator.

    Args:
        size: what the number of shards must divide (the gcd where the labelled dims differ).
        reduce: None for a loop that every result has; "sum", "max", "min", "and", "or" for one that
            is reduced away: splitting it leaves the results partial over the axis.
        partial_operands: operands that must themselves be partial over an axis that splits this factor (the array that
            a scatter-add adds to, when its updates are split).
        halo: of a loop over windows: what a shard needs of its neighbours. Its localizer exchanges the edges.
        halo_operand: the operand whose edges they are.
        travels: operands whose shards go around the devices that split it.
    """

    size: int
    reduce: str | None = None
    partial_operands: tuple[int, ...] = ()
    halo: Halo | None = None
    halo_operand: int = 0
    travels: tuple[Travel, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Dims of an operator that may be split, by factor.

    Args:
        factors: its loops.
        operands: for each operand and dim the index of the factor that it is, or None: kept whole.
        results: likewise for the results.
        linear: groups of operands in which the operator is linear: if all operands of a group are
            partial sums over an axis (and the others are not partial), the results are partial sums.
            ``add`` has one group of both operands, ``mul`` two of one each, ``neg`` one of one.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for dims in (*self.operands, *self.results):
            labels = [d for d in dims if d is not None]
            if len(labels) != len(set(labels)):
                raise ValueError(f"a factor labels two dims of one tensor: {dims}")
            if any(not 0 <= d < len(self.factors) for d in labels):
                raise ValueError(f"no such factor: {dims}")


#: (operator, operand types) -> rule, or None where nothing can be split.
RuleFunction: TypeAlias = Callable[[Operator, tuple[TensorType, ...]], "Rule | None"]


def replicated_rule(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """The rule without factors: every operand and result whole on every device."""
    return Rule(
        factors=(),
        operands=tuple((None,) * t.rank for t in operand_types),
        results=tuple((None,) * v.type.rank for v in op.results),
    )


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
        linear: groups of operands in which the operator is linear: partial sums of one group give a partial sum.
    """
    kept = [loop for loop in loops if loop.factor.size > 1]
    labels: list[list[int | None]] = [[None] * t.rank for t in (*operand_types, *(v.type for v in op.results))]
    for index, loop in enumerate(kept):
        for tensor, dim in loop.places:
            labels[tensor][dim] = index
    dims = [tuple(labelled) for labelled in labels]
    count = len(operand_types)
    return Rule(tuple(loop.factor for loop in kept), tuple(dims[:count]), tuple(dims[count:]), linear)
