"""`solve`: presolve, memory rows only where they bind, a solver, and the way back."""

from __future__ import annotations

import math
import time
from importlib import import_module
from importlib.metadata import entry_points

from autopar.solver.base import Solver, SolverError
from autopar.solver.bounded import solve_bounded
from autopar.solver.elimination import plan_elimination
from autopar.solver.evaluate import is_feasible, maximal_times, objective, within
from autopar.solver.exhaustive import ExhaustiveSolver
from autopar.solver.goal import PROOF, Goal
from autopar.solver.highs import HighsSolver
from autopar.solver.memory import broken_times, memory_floor
from autopar.solver.presolve import reduce_problem
from autopar.solver.problem import ChoiceProblem
from autopar.solver.solution import Solution, Status

#: Group of entry points under which other packages register solvers; each loads to a callable without arguments.
ENTRY_POINTS = "autopar.solvers"


def solver_named(name: str) -> Solver:
    """The solver called ``name``: ``highs``, ``exhaustive``, ``lagrange``, or one of the entry points `ENTRY_POINTS`.

    Raises:
        SolverError: where there is none of that name.
    """
    built_in: dict[str, Solver] = {"exhaustive": ExhaustiveSolver(), "highs": HighsSolver()}
    if name in built_in:
        return built_in[name]
    if name == "lagrange":
        # It loads numba, where that is installed, which takes longer than most problems.
        large: Solver = import_module("autopar.solver.lagrange.solver").LagrangeSolver()
        return large
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        found: Solver = others[name].load()()
        return found
    known = ", ".join(sorted({*built_in, "lagrange", *others}))
    raise SolverError(f"no solver is called {name!r}", remedy=f"use one of: {known}")


def solve(
    problem: ChoiceProblem,
    solver: str | Solver = "highs",
    *,
    time_limit_s: float | None = None,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
    binds: bool = False,
    goal: Goal = PROOF,
) -> Solution:
    """The cheapest choice.

    The memory limit is first left out; times at which the answer breaks it are then imposed, and so on until
    it holds (all times where the problem is wide). Every round's optimum is a lower bound, so the last is the optimum.

    Args:
        problem: what to solve.
        solver: name of a solver, or one; it gets what presolve and bounds leave open (see `bounded`).
        time_limit_s: wall-clock seconds for all rounds; None waits for the proof, except that large problems too wide
            for elimination whose memory limit binds end with a choice, a bound and what is between them.
        start: a choice to begin from; the answer is never worse than a feasible one.
        seed: for solvers that draw numbers.
        binds: whether the limit is known to bind: a wide problem is then not solved without it first.
        goal: when to stop; a problem that is given up has a bound above the goal's cutoff.

    Returns:
        The solution for ``problem`` itself. Its status is OPTIMAL or INFEASIBLE only where that is proven; a
        solver that is not exact proves at most that presolve left nothing to choose.
    """
    began = time.monotonic()
    engine = solver_named(solver) if isinstance(solver, str) else solver
    if engine.capabilities.presolves:
        return engine.solve(problem, time_limit_s=time_limit_s, start=start, seed=seed)
    if not within(memory_floor(problem), problem.limit_bytes):
        return Solution(Status.INFEASIBLE, (), math.inf, math.inf, time.monotonic() - began, engine.name)
    best = start if start is not None and is_feasible(problem, start) else ()
    best_cost = objective(problem, best) if best else math.inf  # an empty problem gets its () below
    bound = -math.inf
    times: tuple[int, ...] = ()
    status = Status.UNKNOWN
    while True:
        reduction = reduce_problem(problem, times)
        if (times or binds) and reduction.problem is not None and plan_elimination(reduction.problem) is None:
            # A wide problem is solved with multipliers on all rows at once; few rows would only make it narrower.
            times = maximal_times(problem.usages)
            reduction = reduce_problem(problem, times)
        if reduction.problem is None:
            return Solution(Status.INFEASIBLE, (), math.inf, math.inf, time.monotonic() - began, engine.name)
        if reduction.problem.nodes:
            left = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - began))
            begin = reduction.project(best) if best else None
            inner_goal = goal.less(reduction.offset)
            answer = solve_bounded(
                reduction.problem, engine, time_limit_s=left, start=begin, seed=seed, goal=inner_goal
            )
            if answer.status is Status.INFEASIBLE:
                return Solution(Status.INFEASIBLE, (), math.inf, math.inf, time.monotonic() - began, engine.name)
            status = answer.status
            bound = max(bound, answer.lower_bound + reduction.offset)
            choice = reduction.lift(answer.choice) if answer.choice else None
        else:
            status, choice = Status.OPTIMAL, reduction.lift(())
            bound = max(bound, objective(problem, choice))
        broken = () if choice is None else broken_times(problem, choice, problem.limit_bytes)
        if choice is not None and not broken:
            cost = objective(problem, choice)
            if cost <= best_cost:
                best, best_cost = choice, cost
        if not broken:
            break
        status = Status.UNKNOWN  # optimal under a part of the limit alone
        if goal.hopeless(bound):
            break
        if time_limit_s is not None and time.monotonic() - began >= time_limit_s:
            break
        times = tuple(sorted({*times, *broken}))
    if status is not Status.OPTIMAL:
        status = Status.FEASIBLE if best else Status.UNKNOWN
    return Solution(status, best, best_cost, min(bound, best_cost), time.monotonic() - began, engine.name)
