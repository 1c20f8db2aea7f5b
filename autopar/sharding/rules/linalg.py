"""Rules of factorizations, solves and Fourier transforms: batch dims are factors, matrix dims stay whole."""

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


def of_vectors(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``tridiagonal_solve``, ``lu_pivots_to_permutation``: a vector first."""
    return _batched(op, operand_types, 1)


def triangular_solve(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Solves of a batch. Linear in the right-hand side."""
    rule = _batched(op, operand_types, 2)
    return None if rule is None else Rule(rule.factors, rule.operands, rule.results, ((1,),))


def fft(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """The transformed dims, as many as ``fft_lengths``, stay whole. Linear."""
    rule = _batched(op, operand_types, len(op.ints("fft_lengths")))
    return None if rule is None else Rule(rule.factors, rule.operands, rule.results, ((0,),))


_VECTORS = ("lu_pivots_to_permutation", "tridiagonal_solve")

RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        **dict.fromkeys(sorted(OF_MATRICES), of_matrices),
        **dict.fromkeys(_VECTORS, of_vectors),
        "fft": fft,
        "triangular_solve": triangular_solve,
    }
)
