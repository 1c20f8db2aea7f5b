"""The algebra of a softmax: sums of monomials in the exponentials, their sum, and what the backward pass brings in.

With E the exponentials of the scores less their largest, L their sum over the keys, G the gradients of the
probabilities and D the sum over the keys of P G (P = E / L):

    sum over keys of E = L        sum over keys of E G = D L        P = E / L        gradient of the scores = P (G - D)

(Dao et al., "FlashAttention", 2022, appendix B.2.) However a program spells the two, they come out as these terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

#: Powers of E, L, G, D.
Powers = tuple[int, int, int, int]


@dataclass(frozen=True)
class Terms:
    """A sum of monomials.

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
