"""The one place that knows PuLP: models an `IntegerProgram` with it and has HiGHS solve it.

Works with PuLP 3.3 (Python 3.11) and 4.x. What differs: how an expression is made from pairs, and what
``solve`` returns. Statuses are not read from PuLP at all: 3.3 calls a time-out "Optimal". Status,
solution and bound are HiGHS's own, through ``solverModel``, which both versions leave on the problem.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

import numpy as np

from autopar.solver.integer_program import IntegerProgram
from autopar.solver.problem import Array

# Both versions are typed differently; as Any, this file checks under either.
pulp: Any = importlib.import_module("pulp")

highspy: Any = importlib.import_module("highspy")

#: Beginnings of the lines that HiGHS 1.16 prints when a process makes its first solver, whatever its options say.
_BANNER: Final = (b"Running HiGHS", b"Includes third-party software components")
_STDOUT: Final = 1
_ONE_AT_A_TIME: Final = Lock()
_THREADS = 2  # fixed: HiGHS has one pool of threads a process and its search depends on their number


@dataclass(frozen=True, eq=False)
class HighsOutcome:
    """Result of HiGHS.

    Args:
        status: "optimal", "infeasible", "limit" (stopped early) or "failed".
        values: by column, where it has a feasible solution.
        bound: the scaled objective of no solution is less; -inf where unknown.
        said: HiGHS's own word for the status.
        iterations: of its simplex methods, over all nodes of the tree.
    """

    status: str
    values: Array | None
    bound: float
    said: str
    iterations: int


def run_highs(
    program: IntegerProgram,
    *,
    time_limit_s: float | None,
    start: Array | None,
    seed: int,
    gap: float,
    max_nodes: int | None = None,
    open_cost: float = 0.0,
    restarts: bool = True,
) -> HighsOutcome:
    """Solve ``program``.

    Args:
        program: what to solve.
        time_limit_s: seconds, or None.
        start: value of each column of a feasible solution to begin from, or None.
        seed: of HiGHS's random numbers.
        gap: relative gap at which to stop.
        max_nodes: of the branch-and-bound tree, or None.
        open_cost: scaled cost between a solution and the bound at which to stop.
        restarts: whether it may start again with what its root has fixed.
    """
    with _ONE_AT_A_TIME:
        _make_first_solver()
    problem = _model(program)
    options: dict[str, Any] = {
        "random_seed": seed,
        "log_to_console": False,
        "output_flag": False,
        "mip_feasibility_tolerance": 1e-8,
        "primal_feasibility_tolerance": 1e-9,
        "dual_feasibility_tolerance": 1e-9,
    }
    if not restarts:
        options["mip_allow_restart"] = False
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    solver = _Highs(msg=False, threads=_THREADS, timeLimit=time_limit_s, gapRel=gap, gapAbs=open_cost, **options)
    solver.start = start
    problem.solve(solver)
    return _answer(problem.solverModel)


@cache
def _make_first_solver() -> None:
    """Makes the first solver of the process, whose banner is kept from the user's standard output."""
    with _without_banner():
        highspy.Highs()


@contextlib.contextmanager
def _without_banner() -> Iterator[None]:
    """Takes the banner out of what is written to file descriptor 1 meanwhile; what other threads write follows it.

    Options of HiGHS come too late, and ``sys.stdout`` is not what it writes to. Without a file descriptor 1 nothing is
    printed, and nothing done.
    """
    try:
        stdout = os.dup(_STDOUT)
    except OSError:
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STDOUT)
        try:
            yield
        finally:
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            written.seek(0)
            kept = b"".join(line for line in written.read().splitlines(True) if not line.startswith(_BANNER))
            while kept:
                kept = kept[os.write(_STDOUT, kept) :]


def _model(program: IntegerProgram) -> Any:
    """The PuLP problem. Names are numbers of one width, since 3.3 orders columns by name."""
    problem = pulp.LpProblem("choice", pulp.LpMinimize)
    width = len(str(program.costs.size))
    upper = [None if math.isinf(u) else u for u in program.upper.tolist()]
    integer = [pulp.LpInteger] * program.binaries
    kinds = integer + [pulp.LpContinuous] * (program.costs.size - program.binaries)
    x = [
        problem.add_variable(f"x{i:0{width}}", 0.0, top, kind)
        for i, (top, kind) in enumerate(zip(upper, kinds, strict=True))
    ]
    # Every column is named in the objective, at 0 too, so that none is left out and columns keep their order.
    problem += _expression(list(zip(x, program.costs.tolist(), strict=True)))
    for row in program.rows:
        columns = [x[i] for i in row.columns.tolist()]
        total = _expression(list(zip(columns, row.values.tolist(), strict=True)))
        problem.addConstraint(total == row.upper if row.lower == row.upper else total <= row.upper)
    return problem


def _expression(pairs: list[tuple[Any, float]]) -> Any:
    """sum of coefficient times variable: 3.3 takes pairs, 4.x has a constructor for them."""
    from_list = getattr(pulp.LpAffineExpression, "from_list", None)
    return pulp.LpAffineExpression(pairs) if from_list is None else from_list(pairs)


def _answer(model: Any) -> HighsOutcome:
    """Status, solution and bound from HiGHS itself."""
    said = model.modelStatusToString(model.getModelStatus())
    info = model.getInfo()
    status = {
        "Optimal": "optimal",
        "Infeasible": "infeasible",
        "Primal infeasible or unbounded": "infeasible",  # no program here is unbounded: no cost is negative
        "Time limit reached": "limit",
        "Iteration limit reached": "limit",
        "Solution limit reached": "limit",
        "Interrupted by user": "limit",
        "Memory limit reached": "limit",
    }.get(said, "failed")
    feasible = model.solutionStatusToString(info.primal_solution_status) == "Feasible"
    values = np.array(model.getSolution().col_value, dtype=np.float64) if feasible else None
    bound = float(info.mip_dual_bound)
    iterations = max(0, int(info.simplex_iteration_count))
    return HighsOutcome(status, values, bound if math.isfinite(bound) else -math.inf, said, iterations)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS with a start: 3.3 has none, and 4.x takes it by variable."""

    start: Array | None = None

    def callSolver(self, lp: Any) -> None:
        """Hand over the start, then solve."""
        if self.start is not None:
            count = self.start.size
            lp.solverModel.setSolution(count, np.arange(count, dtype=np.int32), self.start)
        super().callSolver(lp)

    def findSolutionValues(self, lp: Any) -> Any:
        """PuLP 3.3 does not know every status of HiGHS, such as that of a limit on nodes; `_answer` reads it anyway."""
        try:
            return super().findSolutionValues(lp)
        except KeyError:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
