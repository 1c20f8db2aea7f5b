"""Products of tensors whose dims have labels: what a ``dot_general`` says, and the best order of three factors.

A label in both factors of a product is a batch dim where somebody asks for it later, and is summed over where not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir.graph import Operator

#: Label of each dim of a tensor.
Labels: TypeAlias = tuple[int, ...]

#: The attribute ``dimension_numbers``: dims summed over of both sides, then batch dims of both.
DimensionNumbers: TypeAlias = tuple[tuple[Labels, Labels], tuple[Labels, Labels]]


def dimension_numbers(op: Operator) -> DimensionNumbers:
    """The dims of a ``dot_general``."""
    return op.attr("dimension_numbers")  # type: ignore[return-value]


@dataclass(frozen=True)
class LabelledTensor:
    """A tensor in a product.

    Args:
        name: of the value; "" of one that is not made yet.
        labels: of its dims.
        place: by which factors of a product are ordered; later comes first.
    """

    name: str
    labels: Labels
    place: int


def product_labels(op: Operator, lhs: Labels, rhs: Sequence[int]) -> Labels:
    """Labels of the result of a ``dot_general``: batch, free of the left, free of the right."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers(op)
    free = [k for n, k in enumerate(lhs) if n not in (*lhs_sum, *lhs_batch)]
    return (*(lhs[n] for n in lhs_batch), *free, *(k for n, k in enumerate(rhs) if n not in (*rhs_sum, *rhs_batch)))


def operand_labels(op: Operator, lhs_rank: int, rhs_rank: int) -> tuple[Labels, Labels]:
    """Labels of both operands of a ``dot_general``, counted from 0 along the left."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers(op)
    same = dict(zip((*rhs_sum, *rhs_batch), (*lhs_sum, *lhs_batch), strict=True))
    return tuple(range(lhs_rank)), tuple(same.get(n, lhs_rank + n) for n in range(rhs_rank))


@dataclass(frozen=True)
class LabelledProduct:
    """One product of two factors, in an order that does not depend on who asks for it.

    Args:
        lhs, rhs: factors.
        dims: the attribute ``dimension_numbers``.
        labels: of the result.
    """

    lhs: LabelledTensor
    rhs: LabelledTensor
    dims: DimensionNumbers
    labels: Labels

    @staticmethod
    def of(a: LabelledTensor, b: LabelledTensor, kept: Collection[int]) -> LabelledProduct | None:
        """The product; None where a dim of one factor alone would have to be summed over.

        Args:
            a, b: factors; no label is twice in one.
            kept: labels that somebody asks for later.
        """
        lhs, rhs = sorted((a, b), key=lambda f: (-f.place, f.name))
        shared = [k for k in lhs.labels if k in rhs.labels]
        if any(k not in kept and k not in shared for k in (*lhs.labels, *rhs.labels)):
            return None
        batch, summed = ([k for k in shared if (k in kept) is both] for both in (True, False))
        at = [tuple(tuple(f.labels.index(k) for k in ks) for f in (lhs, rhs)) for ks in (summed, batch)]
        free = [[k for k in f.labels if k not in shared] for f in (lhs, rhs)]
        return LabelledProduct(lhs, rhs, (at[0], at[1]), (*batch, *free[0], *free[1]))  # type: ignore[arg-type]

    def multiplications(self, sizes: Mapping[int, int]) -> int:
        """Number of multiplications of the product."""
        return math.prod(sizes[k] for k in {*self.lhs.labels, *self.rhs.labels})


def best_order(
    x: LabelledTensor, p: LabelledTensor, q: LabelledTensor, asked: Labels, sizes: Mapping[int, int]
) -> tuple[LabelledProduct, LabelledProduct] | None:
    """``x (p q)`` as ``(x p) q`` or ``(x q) p``, whichever has fewer multiplications; None where neither can be.

    Args:
        x, p, q: factors.
        asked: labels of the result.
        sizes: of labels.
    """
    orders = []
    for first, last in ((p, q), (q, p)):
        inner = LabelledProduct.of(x, first, {*last.labels, *asked})
        if inner is None:
            continue
        outer = LabelledProduct.of(LabelledTensor("", inner.labels, max(x.place, first.place)), last, asked)
        if outer is not None:
            orders.append((inner, outer))
    return min(orders, key=lambda o: sum(p.multiplications(sizes) for p in o), default=None)
