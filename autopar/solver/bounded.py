"""Solving a reduced problem by its bounds: elimination, multipliers, and a solver for the little that is left open."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solver.base import Solver
from autopar.solver.elimination import MOST_ENTRIES, plan_elimination
from autopar.solver.evaluate import is_feasible, objective
from autopar.solver.multipliers import price_memory
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.restricted import eliminated, restricted
from autopar.solver.solution import Solution, Status
from autopar.solver.wide import climb
from autopar.solver.wide_memory import price_wide

_OPEN = 300  # strategies beyond one a node that the first restricted problem keeps
_WIDEN = 4
_PROVABLE = 400  # strategies of a wide problem with memory rows up to which the engine is asked for the proof


def solve_bounded(
    problem: ChoiceProblem,
    engine: Solver,
    *,
    time_limit_s: float | None = None,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
    most_entries: int = MOST_ENTRIES,
) -> Solution:
    """The cheapest choice, with ``engine`` only where bounds leave something open.

    Without usages one elimination is exact. With them, multipliers give a bound, a first choice and min-marginals.
    The engine then gets the problem restricted to strategies whose min-marginal is within d of the bound: every
    other choice costs more than bound + d, so an answer that costs no more is the optimum. If it costs more, d grows.
    Where tables would be too large for elimination, messages give the same, if not as sharp (see `wide`). Large
    problems of that kind with memory rows end with the choice and the bound of `wide_memory`, unless it has no choice.

    Args:
        problem: reduced.
        engine: obeys memory.
        time_limit_s, start, seed: see `Solver.solve`.
        most_entries: see `plan_elimination`.
    """
    began = time.monotonic()
    deadline = math.inf if time_limit_s is None else began + time_limit_s
    elimination = plan_elimination(problem, most_entries)
    if elimination is None:
        if problem.usages:
            prices = price_wide(problem, engine, deadline, start, seed, most_entries)
        else:
            prices = climb(problem, deadline, start, most_entries)
    else:
        prices = price_memory(problem, elimination, deadline)
    best, cost = prices.choice, prices.cost
    if start is not None and is_feasible(problem, start) and objective(problem, start) < cost:
        best, cost = start, objective(problem, start)
    bound = prices.bound

    def done(status: Status) -> Solution:
        choice = () if best is None else best
        return Solution(status, choice, cost, min(bound, cost), time.monotonic() - began, engine.name)

    if bound == math.inf:
        return done(Status.INFEASIBLE)
    if elimination is not None and not problem.usages:
        bound = cost
        return done(Status.OPTIMAL)
    wide = elimination is None and problem.usages and sum(node.costs.size for node in problem.nodes) > _PROVABLE
    if wide and best is not None and cost > bound:
        return done(Status.FEASIBLE)
    excess = tuple(marginal - prices.bound for marginal in prices.marginals)
    keep = _OPEN
    while cost > bound:
        left = None if time_limit_s is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return done(Status.UNKNOWN if best is None else Status.FEASIBLE)
        width = min(cost - prices.bound, _width(excess, len(problem.nodes) + keep))
        answer = _solve_within(problem, excess, width, engine, left, best, seed, most_entries)
        if answer.choice and answer.objective < cost:
            best, cost = answer.choice, answer.objective
        bound = max(bound, min(prices.bound + width, answer.lower_bound))
        if answer.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            return done(Status.UNKNOWN if best is None else Status.FEASIBLE)
        if width >= cost - prices.bound:
            break
        keep *= _WIDEN
    return done(Status.INFEASIBLE if best is None else Status.OPTIMAL)


def _width(excess: Sequence[Array], keep: int) -> float:
    """The width within which ``keep`` strategies lie; inf where all of them do."""
    every = np.sort(np.concatenate(list(excess)))
    return float(every[keep]) if keep < every.size else math.inf


def _solve_within(
    problem: ChoiceProblem, excess: Sequence[Array], width: float, engine: Solver, left: float | None,
    start: tuple[int, ...] | None, seed: int, most_entries: int,
) -> Solution:  # fmt: skip
    """The cheapest choice of strategies whose ``excess`` is at most ``width``."""
    reduction = restricted(problem, [over <= width for over in excess])
    if reduction.problem is None:
        return Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, engine.name)
    inner = eliminated(reduction, most_entries)
    if inner is not None:
        choice = reduction.lift(inner)
        cost = objective(problem, choice)
        return Solution(Status.OPTIMAL, choice, cost, cost, 0.0, engine.name)
    begin = None if start is None else reduction.project(start)
    answer = engine.solve(reduction.problem, time_limit_s=left, start=begin, seed=seed)
    bound = answer.lower_bound + reduction.offset
    if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return replace(answer, lower_bound=bound)
    choice = reduction.lift(answer.choice)
    return replace(answer, choice=choice, objective=objective(problem, choice), lower_bound=bound)
