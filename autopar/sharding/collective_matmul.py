"""Collective matmul: a gather before a product, or a scatter after it, as messages next to blocks of the product.

Of an operand that n devices gather each has a block. It multiplies the block that it has while the next one arrives;
of a result that n devices sum and scatter it computes a block while the sum of another one travels on. In all n - 1
messages of a block, the bytes of the gather or scatter. (Wang et al., "Overlap communication with dependent
computation via decomposition in large deep learning models", ASPLOS'23.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.ir import Operator
from autopar.ir.algebra.contractions import operand_labels, product_labels
from autopar.sharding.paths import ReshardStep

#: Of which tensor of a product blocks travel.
Travels: TypeAlias = Literal["lhs", "rhs", "result"]
OPERANDS: tuple[Travels, Travels] = ("lhs", "rhs")


@dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """A product that runs block by block while blocks of one tensor go around a ring (Wang et al., ASPLOS'23).

    Args:
        travels: the tensor whose blocks are sent: an operand or the result.
        dim: its dim that is cut into blocks.
        axes: mesh axes along which they travel, in mesh order.
        sliced: (operand, dim) of which each block takes a slice, besides what travels.
        result_dim: dim of the result in which blocks lie; -1 where their products are added.
    """

    travels: Travels
    dim: int
    axes: tuple[str, ...]
    sliced: tuple[tuple[int, int], ...]
    result_dim: int = -1


def gathered_matmul(
    op: Operator, ranks: Sequence[int], operand: int, step: ReshardStep, names: Sequence[str]
) -> CollectiveMatmul | None:
    """A gather of an operand and the product as one collective matmul; None where they cannot be one.

    Args:
        op: any operator.
        ranks: of its operands.
        operand: number of the operand.
        step: the last step before the product.
        names: axes of the mesh.
    """
    if op.primitive != "dot_general" or step.kind != "all-gather" or not _is_plain(step, names):
        return None
    labels = operand_labels(op, *ranks)
    label, other = labels[operand][step.dim], labels[1 - operand]
    result = product_labels(op, labels[0], labels[1])
    sliced = ((1 - operand, other.index(label)),) if label in other else ()
    result_dim = result.index(label) if label in result else -1
    return CollectiveMatmul(OPERANDS[operand], step.dim, step.axes, sliced, result_dim)


def scattered_matmul(
    op: Operator, ranks: Sequence[int], step: ReshardStep, names: Sequence[str]
) -> CollectiveMatmul | None:
    """A product and the reduce-scatter of its result as one collective matmul; None where they cannot be one.

    Arguments are those of `gathered_matmul`; ``step`` is the only one after the product.
    """
    if op.primitive != "dot_general" or step.kind != "reduce-scatter" or not _is_plain(step, names):
        return None
    labels = operand_labels(op, *ranks)
    label = product_labels(op, labels[0], labels[1])[step.dim]
    sliced = tuple((n, of.index(label)) for n, of in enumerate(labels) if label in of)
    return CollectiveMatmul("result", step.dim, step.axes, sliced, step.dim)


def _is_plain(step: ReshardStep, names: Sequence[str]) -> bool:
    """Whether a step sends numbers as they are, along axes in the order of the mesh."""
    return not step.wire and step.reduce == "sum" and list(step.axes) == sorted(step.axes, key=names.index)
