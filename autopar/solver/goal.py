"""`Goal`: when an answer is good enough, or of no use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Relative gap of a plan that is not worth the time of its proof: costs are estimates that are off by far more.
PLAN_GAP = 1e-4

#: Columns of a problem up to which its proof takes no time.
TINY = 5_000
#: Nodes of a problem without a memory limit up to which its proof takes less time than to load what a relaxation needs.
FEW_NODES = 256

#: Relative gap at which the relaxation of a large problem is enough.
LARGE_GAP = 1e-3

#: Relative gap of problems that are wide and short of memory at which the relaxation is enough: exact programs of such
#: problems take seconds to close a part of it.
WIDE_GAP = 5e-3


@dataclass(frozen=True)
class Goal:
    """Demands of a caller on an answer.

    Args:
        gap: relative gap between cost and bound at which to stop; 0 wants the proof.
        cutoff: cost of what the caller has: once the bound is above it the problem is given up.
        offset: cost that is certain and no part of the problem at hand.
        alone: whether the caller solves few problems: small ones are proven in numpy, and no compiled loops are loaded.
        least: bound that is known before, of the whole cost: that without the memory limit holds within it.
    """

    gap: float = 0.0
    cutoff: float = math.inf
    offset: float = 0.0
    alone: bool = False
    least: float = -math.inf

    def reached(self, cost: float, bound: float) -> bool:
        """Whether a choice of so much, under a bound, is good enough."""
        bound = self.known(bound)
        return cost <= bound or (cost < math.inf and cost - bound <= self.gap * abs(cost + self.offset))

    def known(self, bound: float) -> float:
        """A bound, or what is known before where that is more."""
        return max(bound, self.least - self.offset)

    def hopeless(self, bound: float) -> bool:
        """Whether a bound says that nothing is of use."""
        return self.known(bound) + self.offset > self.cutoff

    def saves_little(self, bound: float, share: float) -> bool:
        """Whether a bound says that no choice costs less than the cutoff by more than a share of it."""
        return self.cutoff < math.inf and bound + self.offset >= self.cutoff - share * abs(self.cutoff)

    def over(self, cost: float, share: float) -> float:
        """Cost of a choice beyond one of use, which saves a share of it, or more."""
        whole = cost + self.offset
        return max(0.0, whole - min(whole, self.cutoff) + share * abs(min(whole, self.cutoff)))

    def less(self, offset: float) -> Goal:
        """The goal for a reduced problem, with ``offset`` taken out of its cost."""
        return replace(self, offset=self.offset + offset)


#: The proof.
PROOF = Goal()
