"""Solving a reduced problem by its bounds: elimination, multipliers, and a solver for the little that is left open."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.solver.base import Solver
from autopar.solver.elimination import MOST_ENTRIES, plan_elimination
from autopar.solver.evaluate import is_feasible, objective
from autopar.solver.goal import PROOF, TINY, WIDE_GAP, Goal
from autopar.solver.multipliers import price_memory
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.restricted import eliminated, restricted
from autopar.solver.solution import Solution, Status
from autopar.solver.wide import climb
from autopar.solver.wide_memory import price_wide

_OPEN = 300  # strategies beyond one a node that the first restricted problem keeps
_WIDEN = 4
_MOST_COLUMNS = 150_000  # of a restricted problem that the engine gets where no proof is wanted
# Likewise without memory rows: no limit on nodes ends HiGHS's root, 6 CPU s for as many columns of dense random costs.
_FREE_COLUMNS = 30_000
_NEAR_COLUMNS = 10_000  # likewise where the gap is small: such programs take seconds to close a part of it
_PROVABLE = 400  # strategies of a wide problem with memory rows up to which the engine is asked for the proof


def solve_bounded(
    problem: ChoiceProblem,
    engine: Solver,
    *,
    time_limit_s: float | None = None,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
    most_entries: int = MOST_ENTRIES,
    goal: Goal = PROOF,
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
        goal: when to stop: the engine is left out where the gap is reached, unless the problem is tiny, and where what
            it would get is large, unless a proof is wanted.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    elimination = plan_elimination(problem, most_entries)
    # Bounds and choices are cheap as long as they get better, but for messages of problems that are not tiny.
    bounds_goal = replace(goal, gap=0.0)
    if elimination is not None:
        prices = price_memory(problem, elimination, deadline, bounds_goal)
    elif problem.usages:
        prices = price_wide(problem, engine, deadline, start, seed, most_entries, bounds_goal)
    else:
        prices = climb(problem, deadline, start, most_entries, goal if problem.columns > TINY else bounds_goal)
    state = _State(problem, engine, seed, deadline, most_entries, goal, prices.choice, prices.cost, prices.bound)
    if start is not None and is_feasible(problem, start):
        state.take(start, objective(problem, start))
    if state.bound == math.inf:
        return state.answer(Status.INFEASIBLE)
    if elimination is not None and not problem.usages:
        state.bound = state.cost
        return state.answer(Status.OPTIMAL)
    wide = elimination is None and problem.usages and sum(node.costs.size for node in problem.nodes) > _PROVABLE
    close = goal.reached(state.cost, state.bound) and problem.columns > TINY
    if state.cost > state.bound and (goal.hopeless(state.bound) or close or (wide and state.best is not None)):
        return state.stopped()
    return state.close([marginal - prices.bound for marginal in prices.marginals])


@dataclass(eq=False)
class _State:
    """What is known of a problem that bounds left open.

    Args:
        problem: reduced.
        engine, seed, most_entries, goal: see `solve_bounded`.
        deadline: of `time.monotonic`.
        best: the cheapest choice, or None.
        cost: its cost; inf where there is none.
        bound: no choice costs less.
    """

    problem: ChoiceProblem
    engine: Solver
    seed: int
    deadline: float
    most_entries: int
    goal: Goal
    best: tuple[int, ...] | None
    cost: float
    bound: float
    began: float = field(default_factory=time.monotonic)

    def take(self, choice: tuple[int, ...], cost: float) -> None:
        """Notes a choice that fits, if it is cheaper."""
        if cost < self.cost:
            self.best, self.cost = choice, cost

    def answer(self, status: Status) -> Solution:
        choice = () if self.best is None else self.best
        seconds = time.monotonic() - self.began
        return Solution(status, choice, self.cost, min(self.bound, self.cost), seconds, self.engine.name)

    def stopped(self) -> Solution:
        return self.answer(Status.UNKNOWN if self.best is None else Status.FEASIBLE)

    def close(self, excess: Sequence[Array]) -> Solution:
        """Asks for the cheapest choice within a width of the bound that grows until the goal is reached.

        Args:
            excess: how much more than the bound each strategy costs at least.
        """
        low, keep = self.bound, _OPEN
        while self.cost > self.bound:
            if time.monotonic() >= self.deadline:
                return self.stopped()
            width = min(self.cost - low, _width(excess, len(self.problem.nodes) + keep))
            answer = self.within(excess, width)
            if answer.choice:
                self.take(answer.choice, answer.objective)
            self.bound = max(self.bound, min(low + width, answer.lower_bound))
            if answer.status not in (Status.OPTIMAL, Status.INFEASIBLE):
                return self.stopped()
            if width >= self.cost - low:
                break
            if self.goal.hopeless(self.bound) or (self.cost > self.bound and self.goal.reached(self.cost, self.bound)):
                return self.stopped()
            keep *= _WIDEN
        return self.answer(Status.INFEASIBLE if self.best is None else Status.OPTIMAL)

    def within(self, excess: Sequence[Array], width: float) -> Solution:
        """The cheapest choice of strategies whose ``excess`` is at most ``width``."""
        name = self.engine.name
        reduction = restricted(self.problem, [over <= width for over in excess])
        if reduction.problem is None:
            return Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, name)
        inner = eliminated(reduction, self.most_entries)
        if inner is not None:
            choice = reduction.lift(inner)
            cost = objective(self.problem, choice)
            return Solution(Status.OPTIMAL, choice, cost, cost, 0.0, name)
        near = replace(self.goal, gap=WIDE_GAP).reached(self.cost, self.bound)
        most = _NEAR_COLUMNS if near else _MOST_COLUMNS if self.problem.usages else _FREE_COLUMNS
        if self.goal.gap > 0 and self.best is not None and reduction.problem.columns > most:
            return Solution(Status.UNKNOWN, (), math.inf, -math.inf, 0.0, name)
        left = None if math.isinf(self.deadline) else self.deadline - time.monotonic()
        begin = None if self.best is None else reduction.project(self.best)
        answer = self.engine.solve(reduction.problem, time_limit_s=left, start=begin, seed=self.seed)
        bound = answer.lower_bound + reduction.offset
        if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return replace(answer, lower_bound=bound)
        choice = reduction.lift(answer.choice)
        return replace(answer, choice=choice, objective=objective(self.problem, choice), lower_bound=bound)


def _width(excess: Sequence[Array], keep: int) -> float:
    """The width within which ``keep`` strategies lie; inf where all of them do."""
    every = np.sort(np.concatenate(list(excess)))
    return float(every[keep]) if keep < every.size else math.inf
