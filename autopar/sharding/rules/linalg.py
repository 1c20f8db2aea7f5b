"""Rules of factorizations, solves and Fourier transforms: batch dims and right-hand sides are factors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import OF_MATRICES
from autopar.sharding.factors import Factor, Rule, RuleFunction


def _batched(op: Operator, operand_types: tuple[TensorType, ...], core: int) -> Rule | None:
    """The first operand has ``core`` last dims that stay whole; all tensors begin with the other dims of it."""
    batch = operand_types[0].shape[: operand_types[0].rank - core]
    types = (*operand_types, *(v.type for v in op.results))
    if any(t.shape[: len(batch)] != batch for t in types):
        return None
    lead = tuple(range(len(batch)))
    labels = [lead + (None,) * (t.rank - len(batch)) for t in types]
    return Rule(
        factors=tuple(Factor(n) for n in batch),
        operands=tuple(labels[: len(operand_types)]),
        results=tuple(labels[len(operand_types) :]),
    )


def of_matrices(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``cholesky``, ``qr``, ``svd`` and others that take a matrix first."""
    return _batched(op, operand_types, 2)


def pivots(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``lu_pivots_to_permutation``: vectors of a batch."""
    return _batched(op, operand_types, 1)


def triangular_solve(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Solves of a batch, for each column of the right-hand side, or each row where the matrix stands right of it."""
    return _solve(_batched(op, operand_types, 2), operand_types, -1 if op.attr("left_side") else -2)


def tridiagonal_solve(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Solves of a batch, for each column of the right-hand side."""
    return _solve(_batched(op, operand_types, 1), operand_types, -1)


def ormqr(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Products with orthogonal factors of a batch, for each column of the other factor, or row where it stands left."""
    return _solve(_batched(op, operand_types, 2), operand_types, -1 if op.attr("left") else -2)


def _solve(rule: Rule | None, operand_types: tuple[TensorType, ...], dim: int) -> Rule | None:
    """A rule with a factor more: ``dim`` of the right-hand side, the last operand, in which the operator is linear."""
    if rule is None:
        return None
    last, count = len(operand_types) - 1, len(rule.factors)
    labels = list(rule.operands[last])
    labels[dim] = count
    right = tuple(labels)
    factors = (*rule.factors, Factor(operand_types[last].shape[dim]))
    return Rule(factors, (*rule.operands[:last], right), (right,), ((last,),))


def fft(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """The transformed dims, as many as ``fft_lengths``, stay whole. Linear."""
    rule = _batched(op, operand_types, len(op.ints("fft_lengths")))
    return None if rule is None else Rule(rule.factors, rule.operands, rule.results, ((0,),))


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        **dict.fromkeys(sorted(OF_MATRICES), of_matrices),
        "fft": fft,
        "lu_pivots_to_permutation": pivots,
        "ormqr": ormqr,
        "triangular_solve": triangular_solve,
        "tridiagonal_solve": tridiagonal_solve,
    }
)
