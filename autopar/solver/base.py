"""`Solver`: the interface of what answers a `ChoiceProblem`."""

from __future__ import annotations

from typing import Protocol

from autopar.errors import AutoparError
from autopar.solver.problem import ChoiceProblem
from autopar.solver.solution import Solution


class SolverError(AutoparError):
    """A solver is unknown, or the problem is beyond what it takes."""


class Solver(Protocol):
    """Answers choice problems. The same problem, start and seed give the same choice unless time runs out."""

    @property
    def name(self) -> str:
        """Short name, as ``highs``."""

    @property
    def presolves(self) -> bool:
        """Whether it wants the whole problem; `solve` then neither reduces it nor leaves memory out at first."""

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """The best choice found.

        Args:
            problem: what to solve.
            time_limit_s: wall-clock seconds after which to stop; None waits for the proof.
            start: a choice to begin from; it need not be feasible.
            seed: for solvers that draw numbers.
        """
