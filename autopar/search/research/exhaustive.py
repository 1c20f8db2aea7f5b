"""All choices, for problems that are small enough: what others are compared with."""

from __future__ import annotations

import math
import time

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method
from autopar.solver import ChoiceProblem, ExhaustiveSolver, Solution, SolverError, objective, reduce_problem


def exhaustive(problem: Problem, most_choices: int = 4_000_000) -> Plan:
    """Tries all choices of small problems, and refuses others.

    Reductions that leave the optimum as it is (`autopar.solver.presolve`: partitioned boolean quadratic programs,
    Scholz and Eckstein, LCTES'02) go first, where the problem is too large without them.

    Args:
        problem: what is planned; `Solving.steps` is the largest number of choices.
        most_choices: that number where it says none: a million take a second.

    Raises:
        SolverError: there are more choices than that; it has their number.
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "exhaustive", enumerate_all, most_choices)


def enumerate_all(run: MethodRun) -> None:
    """Spends the steps of ``run``."""
    problem, most = run.space.problem, run.steps
    solver = ExhaustiveSolver(most)
    if problem.combinations <= most:
        answer = _solved(solver, problem, run.deadline)
        choice, bound = answer.choice, answer.lower_bound
    else:
        reduction = reduce_problem(problem)
        left = reduction.problem
        assert left is not None, "the start is allowed"
        if left.combinations > most:
            raise SolverError(
                f"exhaustive search takes {most:,} choices; this problem has {_size(problem.combinations)} of "
                f"{len(problem.nodes)} nodes, and after reductions {_size(left.combinations)} of {len(left.nodes)}",
                cause="the number of choices is the product of the strategies of all nodes",
                remedy="search='alpa', which proves the optimum, a mesh of one axis, or a smaller function",
            )
        answer = _solved(solver, left, run.deadline)
        # Where reductions leave nothing to choose, the choice is empty and still an answer.
        complete = len(answer.choice) == len(left.nodes)
        choice, bound = reduction.lift(answer.choice) if complete else (), answer.lower_bound + reduction.offset
    run.more(min(most, problem.combinations))
    if choice:
        cost = objective(problem, choice)
        run.offer(choice, cost)
        run.bound = min(bound, cost)


def _solved(solver: ExhaustiveSolver, problem: ChoiceProblem, deadline: float) -> Solution:
    left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
    return solver.solve(problem, time_limit_s=left)


def _size(combinations: int) -> str:
    """A number of choices as text: ``1,234,567``, or ``10^62``."""
    return f"{combinations:,}" if combinations < 10**12 else f"10^{len(str(combinations)) - 1}"
