"""`Counterfactuals`: answers of the search about a plan that is there: the step if one choice is ruled out.

Planning finds them when they are asked for; `autopar.search` implements them, and `autopar.plan.text` shows them.
"""

from __future__ import annotations

from typing import Protocol

from autopar.plan.types import Considered

#: How the notes of plans that people write by hand begin, among what was considered.
ALTERNATIVE = "alternative"

#: Most operators of a program whose alternatives are planned for text and pages: a choice; of 1,400 operators six plans
#: take as long as the search.
MOST_OPERATORS = 4000


#: Share of a step by which packed tables have to be faster for an explanation to tell of them: the gap of plans is of
#: that order.
LEAST_GAIN = 0.01


class Counterfactuals(Protocol):
    """Answers of the search that made a plan."""

    def alternatives(self) -> tuple[Considered, ...]:
        """Plans that people write by hand: as `parallelize(search=NAME)` finds them in the microbatches of the plan."""

    def packed(self) -> Considered | None:
        """The best plan of the step whose separate embedding tables are packed into one array; None where none are."""

    def without(self, name: str) -> Considered | None:
        """The best plan without what was chosen for an operator or argument, everything else chosen again.

        None where that is not known: the plan has several stages, or the choice is none of its own.
        """
