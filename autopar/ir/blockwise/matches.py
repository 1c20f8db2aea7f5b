"""`AttentionCore`: a core of attention that was recognized, and the values that recognition goes by.

`Terms` is the algebra of a softmax. With E the exponentials of the scores less their largest, L their sum over the
keys, G the gradients of the probabilities and D the sum over the keys of P G (P = E / L):

    sum over keys of E = L        sum over keys of E G = D L        P = E / L        gradient of the scores = P (G - D)

(Dao et al., "FlashAttention", 2022, appendix B.2.) However a program spells the two, they come out as these terms.
`autopar.ir.blockwise.recognize` follows a graph by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal as OneOf
from typing import TypeAlias

from autopar.ir.blockwise.spec import Labels
from autopar.ir.graph import Operator

#: Powers of E, L, G, D.
Powers = tuple[int, int, int, int]
#: "scores": they, or what is computed of them element by element; "largest": of each row; "shifted": scores less it;
#: "terms": see `Terms`; "slope": computed of the gradient of the softmax's operand element by element; "other": none.
Kind: TypeAlias = OneOf["scores", "largest", "shifted", "terms", "slope", "other"]


@dataclass(frozen=True)
class Terms:
    """A polynomial in the values of a softmax: the form in which its backward pass is recognized.

    Monomials are powers of e (exponentials of shifted scores), l (their sum over keys), g (gradients of the
    probabilities) and d (sum over keys of probabilities times g).

    Args:
        of: the coefficient of each; none is 0.
    """

    of: tuple[tuple[Powers, Fraction], ...] = ()

    @staticmethod
    def make(of: Mapping[Powers, Fraction]) -> Terms:
        """The sum, without what has the coefficient 0."""
        return Terms(tuple(sorted((p, c) for p, c in of.items() if c)))

    @staticmethod
    def one(e: int = 0, l: int = 0, g: int = 0, d: int = 0) -> Terms:  # noqa: E741
        """The monomial of these powers, with the coefficient 1."""
        return Terms((((e, l, g, d), Fraction(1)),))

    def plus(self, other: Terms, sign: int = 1) -> Terms:
        """The sum of two, or their difference."""
        total = dict(self.of)
        for powers, coefficient in other.of:
            total[powers] = total.get(powers, Fraction(0)) + sign * coefficient
        return Terms.make(total)

    def times(self, other: Terms) -> Terms:
        """Product of this polynomial and another."""
        total: dict[Powers, Fraction] = {}
        for a, x in self.of:
            for b, y in other.of:
                powers = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
                total[powers] = total.get(powers, Fraction(0)) + x * y
        return Terms.make(total)

    def scaled(self, factor: Fraction) -> Terms:
        """This polynomial times a number."""
        return Terms.make({p: factor * c for p, c in self.of})

    def power(self, exponent: int) -> Terms | None:
        """A power of a monomial; None of a sum with a negative exponent."""
        if exponent >= 0:
            total = Terms.one()
            for _ in range(exponent):
                total = total.times(self)
            return total
        if len(self.of) != 1:
            return None
        ((powers, coefficient),) = self.of
        e, l, g, d = (exponent * p for p in powers)  # noqa: E741
        return Terms((((e, l, g, d), coefficient**exponent),))

    def summed(self) -> Terms | None:
        """The sum over the keys; None where it is none of the known ones."""
        total: dict[Powers, Fraction] = {}
        for (e, l, g, d), c in self.of:  # noqa: E741
            if (e, g) == (1, 0):
                powers = (0, l + 1, 0, d)
            elif (e, g) == (1, 1):
                powers = (0, l + 1, 0, d + 1)
            else:
                return None
            total[powers] = total.get(powers, Fraction(0)) + c
        return Terms.make(total)


EXPONENTIALS = Terms.one(e=1)
PROBABILITIES = Terms.one(e=1, l=-1)
GRADIENTS = Terms.one(g=1)
#: P (G - D).
OF_SCORES = Terms.one(e=1, l=-1, g=1).plus(Terms.one(e=1, l=-1, d=1), -1)


@dataclass(frozen=True)
class CoreValue:
    """Role of a value in the core of attention.

    Args:
        kind: part of the softmax that it is: "scores", "largest" of a row, "shifted" scores, sums of "terms", "slope"
            of the gradient, or "other".
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
