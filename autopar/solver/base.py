"""`Solver`: the interface of what answers a `ChoiceProblem`, and its checks for solvers of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, Protocol

from autopar.errors import AutoparError
from autopar.errors.offers import Call, Interface
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


_INTERFACE = Interface(
    "solver",
    rule="a solver has a name, presolves (True or False) and solve(problem, *, time_limit_s, start, seed) -> Solution",
    remedy="add it; autopar.solver.Solver is the interface, autopar.solver.ExhaustiveSolver a short example",
    fields={"name": str, "presolves": bool},
    methods={"solve": Call(("problem",), ("time_limit_s", "start", "seed"))},
    error=SolverError,
)
_FACTORY = Interface(
    "solver",
    rule="an entry point of solvers is a class or function that is called without arguments and returns a solver",
    remedy='mine = "my_package:MySolver" under [project.entry-points."autopar.solvers"]',
    call=Call(()),
    error=SolverError,
)


def check_solver(solver: Any) -> None:
    """Raises SolverError where an object has not all that a `Solver` has."""
    _INTERFACE.check(type(solver).__name__, solver)


def loaded_solver(point: EntryPoint) -> Solver:
    """The solver of an entry point. Raises SolverError where it cannot be loaded or is none."""
    factory = _FACTORY.load(point)
    _FACTORY.check(point.name, factory)
    solver: Solver = factory()
    _INTERFACE.check(point.name, solver)
    return solver


def solution_of(
    solver: Solver, problem: ChoiceProblem, *, time_limit_s: float | None, start: tuple[int, ...] | None, seed: int
) -> Solution:
    """The answer of a solver; arguments as of `Solver.solve`. Raises SolverError where it is no `Solution`."""
    answer = solver.solve(problem, time_limit_s=time_limit_s, start=start, seed=seed)
    _INTERFACE.check_answer(solver.name, answer, Solution)
    return answer
