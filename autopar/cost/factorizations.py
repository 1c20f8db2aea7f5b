"""FLOPs of factorizations, solves and Fourier transforms of dense matrices.

Counts are those of Golub and Van Loan, Matrix Computations (4th ed.): Cholesky 4.2, LU 3.2, QR 5.2, symmetric
eigenvectors 8.3, the singular value decomposition by R-bidiagonalization 8.6, the Schur form 7.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from autopar.ir import Operator, TensorType


def _qr(long: float, short: float) -> float:
    return 2 * short**2 * (long - short / 3)


# From the longer and the shorter side of a matrix to FLOPs.
_OF_MATRIX: Mapping[str, Callable[[float, float], float]] = MappingProxyType(
    {
        "cholesky": lambda long, short: short**3 / 3,
        "eig": lambda long, short: 25 * short**3,
        "eigh": lambda long, short: 9 * short**3,
        "geqrf": _qr,
        "hessenberg": lambda long, short: 10 * short**3 / 3,
        "householder_product": _qr,
        "lu": lambda long, short: short**2 * (long - short / 3),
        "qr": lambda long, short: 2 * _qr(long, short),
        "schur": lambda long, short: 25 * short**3,
        "svd": lambda long, short: 6 * long * short**2 + 20 * short**3,
        "tridiagonal": lambda long, short: 4 * short**3 / 3,
    }
)


def factorization_flops(op: Operator, operand_types: Sequence[TensorType]) -> float:
    """FLOPs of one operator on whole tensors; 0 of one that is no factorization, solve or Fourier transform.

    Args:
        op: the operator; ``fft`` has the attribute ``fft_lengths``.
        operand_types: type of each operand: matrices in the last two dims.
    """
    name = op.primitive
    if name in _OF_MATRIX and operand_types[0].rank >= 2:
        *batch, rows, columns = operand_types[0].shape
        return math.prod(batch) * _OF_MATRIX[name](max(rows, columns), min(rows, columns))
    if name == "triangular_solve" and operand_types[0].rank >= 2:
        return float(operand_types[0].shape[-1] * operand_types[1].size)
    if name == "fft":
        points = math.prod(op.ints("fft_lengths"))
        return 5.0 * op.results[0].type.size * math.log2(points) if points > 1 else 0.0
    return 0.0
