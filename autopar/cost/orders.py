"""Operands that a compiler brings into another order before a matrix product or a convolution.

XLA does so before it calls the product of a library (its `DotDecomposer`): dims of the batch first, then those that
stay, then those that are summed over, and for the right operand the last two the other way round. A product that has
at most one dim of each of the last two kinds is left as it is, and so is a matrix with one of each: libraries take a
transposed matrix. Convolutions take
(batch, spatial dims, features) and kernels (spatial dims, in, out) (its `ConvCanonicalization`).

A matrix that is summed over along its first dim, times another, goes to another library on CPUs, which brings blocks
of both matrices into its own order. A product that a transposition alone reads has its operands the other way round
(`autopar.ir.transposed_products`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Attr, Operator, TensorType

#: Stride at which blocks are packed: their columns lie closer together than the matrix's. Gradients of weights of 32 to
#: 1,024 features and 256 to 4,096 rows took 0.7 to 2.4 ns a float of both operands longer than forward products of the
#: same size on an EPYC, whose copies at this stride take 1.4 ns.
PACKED_STRIDE_BYTES = 256


@dataclass(frozen=True)
class Reorder:
    """An operand that is copied in another order.

    Args:
        operand: its number.
        stride_bytes: bytes between elements that come to lie side by side; 0 where those of the last dim stay so.
    """

    operand: int
    stride_bytes: int


def reorders(op: Operator, operand_types: Sequence[TensorType], *, swapped: bool = False) -> tuple[Reorder, ...]:
    """The operands of ``op`` that XLA brings into another order, none for all but products and convolutions.

    Args:
        op: the operator; ``dot_general`` has the attribute ``dimension_numbers``, ``conv_general_dilated``
            ``lhs_spec`` and ``rhs_spec``.
        operand_types: type of each operand.
        swapped: whether its program has the operands of a product the other way round.
    """
    if op.primitive == "dot_general":
        orders = _of_product(op, operand_types, int(swapped))
    elif op.primitive == "conv_general_dilated":
        batch, features, *spatial = op.ints("lhs_spec")
        out, into, *window = op.ints("rhs_spec")
        orders = ((batch, *spatial, features), (*window, into, out))
    else:
        return ()
    candidates = (_reorder(n, type, order) for n, (type, order) in enumerate(zip(operand_types, orders, strict=True)))
    return tuple(r for r in candidates if r is not None)


def packed(op: Operator, operand_types: Sequence[TensorType], *, swapped: bool = False) -> tuple[Reorder, ...]:
    """The operands of a product that a library packs: both where the left one is summed over along its first dim.

    Args:
        op: the operator.
        operand_types: type of each operand.
        swapped: whether its program has the operands the other way round.
    """
    if op.primitive != "dot_general":
        return ()
    summed, shared, unshared = _roles(op, operand_types)
    matrices = all(any(operand_types[n].shape[d] > 1 for d in unshared[n]) for n in (0, 1))
    # What XLA brings into order has its summed dims last on the left.
    if shared[0] or not summed[0] or not matrices or not _taken(op, operand_types):
        return ()
    left = int(swapped)
    first = summed[left][0] < unshared[left][0]
    return tuple(Reorder(n, PACKED_STRIDE_BYTES) for n in (0, 1)) if first else ()


def run_bytes(op: Operator, operand_types: Sequence[TensorType]) -> int:
    """Bytes of a reduction's operand that lie side by side and go into one result, or each into its own.

    Args:
        op: the operator; a reduction has the attribute ``axes``.
        operand_types: type of each operand.

    Returns:
        0 for what is no reduction.
    """
    if not op.primitive.startswith("reduce_") or all(name != "axes" for name, _ in op.attrs):
        return 0
    type, axes = operand_types[0], op.ints("axes")
    run = 1
    for d in range(type.rank - 1, -1, -1):
        if (d in axes) != (type.rank - 1 in axes) and type.shape[d] > 1:
            break
        run *= type.shape[d]
    return run * type.nbytes // type.size if type.size else 0


def _of_product(op: Operator, types: Sequence[TensorType], left: int) -> tuple[tuple[int, ...], ...]:
    """Dims of each operand in the order that a library takes, empty if it takes the product as it is."""
    if _taken(op, types):
        return ((), ())
    summed, shared, unshared = _roles(op, types)
    kinds = [(shared[n], *((unshared[n], summed[n]) if n == left else (summed[n], unshared[n]))) for n in (0, 1)]
    orders = [tuple(d for dims in each for d in dims) for each in kinds]
    # A matrix is transposed by the library, whatever the other operand is.
    return tuple(() if types[n].rank == 2 and not shared[n] else order for n, order in enumerate(orders))


def _taken(op: Operator, types: Sequence[TensorType]) -> bool:
    """Whether a library takes a product as it is."""
    summed, shared, unshared = _roles(op, types)
    leads = all(dims == tuple(range(len(dims))) for dims in shared)
    return leads and len(summed[0]) == 1 and all(len(dims) <= 1 for dims in unshared)


def _roles(op: Operator, types: Sequence[TensorType]) -> tuple[list[tuple[int, ...]], ...]:
    """Dims of both operands of a product that are summed over, that are of its batch, and that are neither."""
    numbers = op.attr("dimension_numbers")
    if not isinstance(numbers, tuple) or len(numbers) != 2:
        raise TypeError(f"not dimension numbers: {numbers!r}")
    contract, batch = numbers
    summed, shared = [_dims(contract, n) for n in (0, 1)], [_dims(batch, n) for n in (0, 1)]
    unshared = [
        tuple(d for d in range(t.rank) if d not in summed[n] and d not in shared[n]) for n, t in enumerate(types[:2])
    ]
    return summed, shared, unshared


def _dims(pair: Attr, at: int) -> tuple[int, ...]:
    dims = pair[at] if isinstance(pair, tuple) else ()
    return tuple(d for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else ()


def _reorder(operand: int, type: TensorType, order: Sequence[int]) -> Reorder | None:
    real = [d for d in order if type.shape[d] > 1]
    if real == sorted(real):  # dims of one element may lie anywhere
        return None
    inner = math.prod(type.shape[real[-1] + 1 :])
    return Reorder(operand, 0 if inner == 1 else inner * type.nbytes // type.size)
