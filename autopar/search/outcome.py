"""`Outcome`: what became of a region of the decision. It is a value: no exception says that a plan is slower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from autopar.errors import InfeasiblePlanError


@dataclass(frozen=True)
class Planned:
    """A region has a plan.

    Args:
        step_s: seconds of its step.
        estimate_s: seconds that it was expected to take before it was planned; None where nothing said so.
        by: the relaxation that said so.
    """

    step_s: float
    estimate_s: float | None = None
    by: str = ""


@dataclass(frozen=True)
class Bounded:
    """No plan of a region is faster than the best known.

    Args:
        by: the bound, or the estimate, in words.
        least_s: seconds of a step that it says; None where it says no number.
    """

    by: str
    least_s: float | None = None


@dataclass(frozen=True)
class TooLarge:
    """Nothing of a region fits the memory.

    Args:
        where: in words.
        missing_bytes: bytes a device above the limit; None where not known.
    """

    where: str
    missing_bytes: int | None = None


@dataclass(frozen=True)
class Impossible:
    """A region has no plan whatever the memory.

    Args:
        fact: why.
    """

    fact: str


@dataclass(frozen=True)
class LeftOut:
    """A rule of the enumeration leaves a region out: nothing is known of its plans.

    Args:
        rule: in words.
    """

    rule: str


class NoRoomError(InfeasiblePlanError):
    """No layout fits the memory, on any mesh of these devices: equal pieces of all values do not."""

    def for_users(self) -> InfeasiblePlanError:
        """The error as users are told of it."""
        return InfeasiblePlanError(
            self.fact, least_bytes=self.least_bytes, cause=self.cause, remedy=self.remedy, source=self.source
        )


Outcome: TypeAlias = Planned | Bounded | TooLarge | Impossible | LeftOut

Answer = TypeVar("Answer")


def within_reach(answer: Answer | Bounded) -> Answer:
    """An answer that nothing has to be faster than, so that no bound closes it."""
    assert not isinstance(answer, Bounded), answer
    return answer
