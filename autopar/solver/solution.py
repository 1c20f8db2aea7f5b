"""`Solution`: what a solver answers, with an honest status and a bound."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """Outcome of a solver."""

    OPTIMAL = "proven optimal"
    FEASIBLE = "feasible; not proven optimal"
    INFEASIBLE = "proven infeasible"
    UNKNOWN = "stopped before it found a solution or proved that there is none"


@dataclass(frozen=True)
class Solution:
    """The answer to a `ChoiceProblem`.

    Args:
        status: what is known.
        choice: index of the strategy of each node; empty where there is no solution.
        objective: cost of ``choice``, evaluated on the problem itself; inf where there is none.
        lower_bound: no choice costs less than this (-inf where nothing was proven).
        seconds: time that the solver took.
        solver: name of the solver.
        phases: seconds by phase, in order, where the solver tells them.
    """

    status: Status
    choice: tuple[int, ...]
    objective: float
    lower_bound: float
    seconds: float
    solver: str
    phases: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("objective", "lower_bound"):  # numpy's numbers are refused by encoders
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def found(self) -> bool:
        """Whether there is a solution; that of a problem without nodes is the empty choice."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective; 0 where proven optimal, inf where nothing is known."""
        if self.status is Status.OPTIMAL or self.objective == self.lower_bound:
            return 0.0
        if not self.choice or self.objective <= 0:
            return float("inf")
        return (self.objective - self.lower_bound) / self.objective
