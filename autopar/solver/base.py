"""`Solver`: what answers a `ChoiceProblem`, and what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autopar.errors import AutoparError
from autopar.solver.problem import ChoiceProblem
from autopar.solver.solution import Solution


class SolverError(AutoparError):
    """A solver is unknown, or the problem is beyond what it takes."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a solver.

    Args:
        exact: with enough time it proves its answer optimal.
        memory: it obeys the limit on usages; one that does not refuses problems that have a limit and usages.
        anytime: it has an answer, if a worse one, when the time limit strikes.
        seeded: its answer may depend on ``seed``.
        presolves: it wants the whole problem; `solve` then neither reduces it nor leaves memory out at first.
        max_nodes: most nodes that it takes, or None.
        max_combinations: most combinations of strategies that it takes, or None.
    """

    exact: bool
    memory: bool
    anytime: bool
    seeded: bool
    presolves: bool = False
    max_nodes: int | None = None
    max_combinations: int | None = None


class Solver(Protocol):
    """Answers choice problems. The same problem, start and seed give the same choice unless time runs out."""

    @property
    def name(self) -> str:
        """Short name, as ``highs``."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of this solver."""
        ...

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
        ...


def check_size(problem: ChoiceProblem, name: str, capabilities: Capabilities) -> None:
    """Raise `SolverError` where ``problem`` is beyond the ``capabilities`` of the solver called ``name``."""
    most = capabilities.max_nodes
    if most is not None and len(problem.nodes) > most:
        raise SolverError(
            f"solver {name!r} takes {most} nodes, the problem has {len(problem.nodes)}", remedy="use solver 'highs'"
        )
    most = capabilities.max_combinations
    if most is not None and problem.combinations > most:
        raise SolverError(
            f"solver {name!r} takes {most:,} combinations of strategies, the problem has {problem.combinations:,}",
            remedy="use solver 'highs'",
        )
    if not capabilities.memory and problem.usages and problem.limit_bytes is not None:
        raise SolverError(f"solver {name!r} knows no memory limit", remedy="use solver 'highs'")
