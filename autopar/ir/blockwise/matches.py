"""`AttentionCore`: a core of attention that was recognized, and the abstract values that recognition goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal as OneOf
from typing import TypeAlias

from autopar.ir.blockwise.dims import Labels
from autopar.ir.blockwise.terms import Terms
from autopar.ir.graph import Operator

#: "scores": they, or what is computed of them element by element; "largest": of each row; "shifted": scores less it;
#: "terms": see `Terms`; "slope": computed of the gradient of the softmax's operand element by element; "other": none.
Kind: TypeAlias = OneOf["scores", "largest", "shifted", "terms", "slope", "other"]


@dataclass(frozen=True)
class CoreValue:
    """Role of a value in the core of attention.

    Args:
        kind: see `Kind`.
        labels: of its dims.
        terms: of a value of that kind.
    """

    kind: Kind
    labels: Labels
    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True)
class Product:
    """A matrix product of a core that is not the scores'.

    Args:
        op: the operator.
        labels: of its result.
        operands: labels of its operands, in order.
        other: name of the operand from outside of the core.
        square: the other one's name.
    """

    op: Operator
    labels: Labels
    operands: tuple[Labels, Labels]
    other: str
    square: str

    @property
    def other_labels(self) -> Labels:
        """Labels of the operand from outside."""
        return self.operands[self.op.operands.index(self.other)]


@dataclass(frozen=True)
class AttentionCore:
    """A core of attention.

    Args:
        product: makes the scores of queries and keys.
        queries, keys, values: names.
        key_loop: number of the loop over keys.
        softmax: name of what the softmax is of.
        result: the product of probabilities and values; None where only the backward pass takes the probabilities.
        slope: name of the gradient of ``softmax``; "" without a backward pass.
        gradient: name of the gradient of the result; "" likewise.
        seen: the product of ``gradient`` and the values: the gradient of the probabilities.
        products: by "queries", "keys", "values" the product that makes their gradients.
        between: operators from scores to softmax, and from ``slope`` to the gradient of the scores, in order.
        known: every value inside.
        labels: loops of the dims of "queries", "keys", "values", "scores" and "gradient".
        inside: ids of its operators.
    """

    product: Operator
    queries: str
    keys: str
    values: str
    key_loop: int
    softmax: str
    result: Product | None
    slope: str
    gradient: str
    seen: Product | None
    products: dict[str, Product]
    between: tuple[Operator, ...]
    known: dict[str, CoreValue]
    labels: dict[str, Labels]
    inside: frozenset[str]
