"""`solve`: presolve, memory rows only where they bind, a solver, and the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

import numpy as np

from autopar.errors.names import known_names
from autopar.solver.base import Solver, SolverError, check_solver, loaded_solver, solution_of
from autopar.solver.elimination import MOST_ENTRIES, plan_elimination
from autopar.solver.evaluate import is_feasible, maximal_times, objective, within
from autopar.solver.exhaustive import ExhaustiveSolver
from autopar.solver.goal import FEW_NODES, LARGE_GAP, PROOF, TINY, WIDE_GAP, Goal
from autopar.solver.highs import HighsSolver
from autopar.solver.memory import broken_times, memory_floor
from autopar.solver.multipliers import price_memory
from autopar.solver.plain import MANY_ENTRIES, MANY_NODES
from autopar.solver.presolve import Reduction, reduce_problem
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.restricted import eliminated, restricted
from autopar.solver.solution import Solution, Status
from autopar.solver.wide import climb
from autopar.solver.wide_memory import price_wide

#: Group of entry points under which other packages register solvers; each loads to a callable without arguments.
ENTRY_POINTS = "autopar.solvers"

_BUILT_IN: Mapping[str, Callable[[], Solver]] = MappingProxyType({"exhaustive": ExhaustiveSolver, "highs": HighsSolver})
#: The solver that is imported when it is asked for: it loads numba, which takes longer than most problems.
LAGRANGE = "lagrange"

#: Columns from which on a relaxation whose gap is at most `LARGE_GAP` is the answer: exact solving takes longer than it
#: is worth.
LARGE = 100_000


def solvers() -> tuple[str, ...]:
    """Names of all solvers, sorted."""
    return tuple(sorted({*_BUILT_IN, LAGRANGE, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def solver_named(name: str) -> Solver:
    """The solver called ``name``: ``highs``, ``exhaustive``, ``lagrange``, or one of the entry points `ENTRY_POINTS`.

    Raises:
        SolverError: where there is none of that name.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if name == LAGRANGE:
        large: Solver = import_module("autopar.solver.lagrange.solver").LagrangeSolver()
        return large
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        return loaded_solver(others[name])
    raise SolverError(f"no solver is called {name!r}", remedy=known_names(name, solvers()))


def solve_relaxed(problem: ChoiceProblem, goal: Goal, start: tuple[int, ...] | None = None) -> Solution | None:
    """A choice and a bound in milliseconds (see `autopar.solver.relaxation`), or None.

    None where the proof is wanted or takes no longer.

    Args:
        problem: what to solve.
        goal: when to stop early.
        start: a choice to begin from.
    """
    free, nodes = problem.limit_bytes is None, len(problem.nodes)
    is_small = problem.columns <= TINY or (free and nodes <= FEW_NODES)
    is_small |= free and goal.alone and nodes <= MANY_NODES and problem.columns <= MANY_ENTRIES
    if goal.gap == 0 or is_small:
        return None
    # It loads numba, which takes longer than most problems.
    answer: Solution = import_module("autopar.solver.relaxation").solve_relaxed(problem, goal, start=start)
    return answer


def solve(
    problem: ChoiceProblem,
    solver: str | Solver = "highs",
    *,
    time_limit_s: float | None = None,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
    known: Solution | None = None,
    binds: bool = False,
    goal: Goal = PROOF,
) -> Solution:
    """The cheapest choice.

    Where no proof is wanted a relaxation comes first (`solve_relaxed`): it is the answer where its gap is small enough
    or its bound above the cutoff, and what is left open of a problem that is wide and short of memory is not worth
    more. The memory limit is first left out; times at which the answer breaks it are then imposed, and so on until it
    holds (all times where the problem is wide). Every round's optimum is a lower bound, so the last is the optimum.

    Args:
        problem: what to solve.
        solver: name of a solver, or one; it gets what presolve and bounds leave open (see `bounded`).
        time_limit_s: wall-clock seconds for all rounds; None waits for the proof, except that large problems too wide
            for elimination whose memory limit binds end with a choice, a bound and what is between them.
        start: a choice to begin from; the answer is never worse than a feasible one.
        seed: for solvers that draw numbers.
        known: a relaxation of the problem, where there was one already.
        binds: whether the limit is known to bind: a wide problem is then not solved without it first.
        goal: when to stop; a problem that is given up has a bound above the goal's cutoff.

    Returns:
        The solution for ``problem`` itself. Its status is OPTIMAL or INFEASIBLE only where that is proven; a
        solver that is not exact proves at most that presolve left nothing to choose.
    """
    began = time.monotonic()
    if not isinstance(solver, str):
        check_solver(solver)
    engine = solver_named(solver) if isinstance(solver, str) else solver
    if engine.presolves:
        return solution_of(engine, problem, time_limit_s=time_limit_s, start=start, seed=seed)
    if not within(memory_floor(problem), problem.limit_bytes):
        return Solution(Status.INFEASIBLE, (), math.inf, math.inf, time.monotonic() - began, engine.name)
    known = known or solve_relaxed(problem, goal, start)
    if known is not None and known.choice:
        start = known.choice
    deadline = math.inf if time_limit_s is None else began + time_limit_s
    rounds = _Rounds(problem, engine, goal, seed, deadline, began=began)
    if start and is_feasible(problem, start):
        rounds.take(start, objective(problem, start))
    if known is not None:
        rounds.bound = known.lower_bound
        enough = known.status in (Status.OPTIMAL, Status.INFEASIBLE) or goal.hopeless(known.lower_bound)
        near = replace(goal, gap=max(goal.gap, LARGE_GAP))
        if enough or (problem.columns > LARGE and near.reached(known.objective, known.lower_bound)):
            return rounds.answer(known.status)
    return rounds.run(binds)


@dataclass(eq=False)
class _Known:
    """Best choice and bound of a problem while it is solved.

    Args:
        problem, engine, goal, seed: see `solve`.
        deadline: of `time.monotonic`.
        best: the cheapest feasible choice, or None.
        cost: its cost; inf where there is none.
        bound: no choice costs less.
        began: reading of `time.monotonic`.
    """

    problem: ChoiceProblem
    engine: Solver
    goal: Goal
    seed: int
    deadline: float
    best: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = -math.inf
    began: float = field(default_factory=time.monotonic)

    def take(self, choice: tuple[int, ...], cost: float) -> None:
        """Notes a choice that fits, if it is cheaper."""
        if cost < self.cost:
            self.best, self.cost = choice, cost

    def answer(self, status: Status = Status.UNKNOWN) -> Solution:
        """The solution: OPTIMAL or INFEASIBLE where that is proven, else what is known."""
        seconds = time.monotonic() - self.began
        if status is Status.INFEASIBLE:
            return Solution(status, (), math.inf, math.inf, seconds, self.engine.name)
        if status is not Status.OPTIMAL:
            status = Status.UNKNOWN if self.best is None else Status.FEASIBLE
        return Solution(status, self.best or (), self.cost, min(self.bound, self.cost), seconds, self.engine.name)


@dataclass(eq=False)
class _Rounds(_Known):
    """Solving under more and more of the memory limit."""

    def run(self, binds: bool) -> Solution:
        """Rounds until the answer holds the limit; ``binds`` as of `solve`."""
        problem, goal = self.problem, self.goal
        times: tuple[int, ...] = ()
        while True:
            reduction = reduce_problem(problem, times)
            if (times or binds) and reduction.problem is not None and plan_elimination(reduction.problem) is None:
                near = Goal(WIDE_GAP).reached(self.cost, self.bound) or goal.saves_little(self.bound, WIDE_GAP)
                if self.best and near and goal.gap > 0:
                    return self.answer()
                # A wide problem is solved with multipliers on all rows at once; few rows would only make it narrower.
                times = maximal_times(problem.usages)
                reduction = reduce_problem(problem, times)
            if reduction.problem is None:
                return self.answer(Status.INFEASIBLE)
            if reduction.problem.nodes:
                status, choice = self._inner(reduction, reduction.problem)
                if status is Status.INFEASIBLE:
                    return self.answer(status)
            else:
                status, choice = Status.OPTIMAL, reduction.lift(())
                self.bound = max(self.bound, objective(problem, choice))
            broken = () if choice is None else broken_times(problem, choice, problem.limit_bytes)
            if choice is not None and not broken:
                cost = objective(problem, choice)
                if cost <= self.cost:
                    self.best, self.cost = choice, cost
            if not broken:
                return self.answer(status)
            # What is optimal under a part of the limit alone is no answer.
            if goal.hopeless(self.bound) or time.monotonic() >= self.deadline:
                return self.answer()
            times = tuple(sorted({*times, *broken}))

    def _inner(self, reduction: Reduction, inner: ChoiceProblem) -> tuple[Status, tuple[int, ...] | None]:
        """Solves the ``inner`` problem of a reduction; raises the bound."""
        left = None if math.isinf(self.deadline) else max(0.0, self.deadline - time.monotonic())
        begin = reduction.project(self.best) if self.best else None
        answer = solve_bounded(
            inner, self.engine, time_limit_s=left, start=begin, seed=self.seed, goal=self.goal.less(reduction.offset)
        )
        self.bound = max(self.bound, answer.lower_bound + reduction.offset)
        return answer.status, reduction.lift(answer.choice) if answer.choice else None


_OPEN = 300  # strategies beyond one a node that the first restricted problem keeps
_WIDEN = 4
_MOST_COLUMNS = 150_000  # of a restricted problem that the engine gets where no proof is wanted
# Likewise without memory rows, or where the gap is small. No limit on nodes ends the cuts of HiGHS's root: of 26,000
# columns of a GPT on 512 devices they took 83 CPU s, and the plan of the answer was slower than without.
_FEW_COLUMNS = 10_000
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

    Without usages one elimination is exact. With them, multipliers give a bound, a first choice and min-marginals. The
    engine then gets the problem restricted to strategies whose min-marginal is within d of the bound: every other
    choice costs more than bound + d, so an answer that costs no more is the optimum. If it costs more, d grows. Where
    tables would be too large for elimination, messages give the same, if not as sharp (see `wide`). Large problems of
    that kind with memory rows end with the choice and the bound of `wide_memory`, unless it has no choice.

    Args:
        problem: reduced.
        engine: obeys memory.
        time_limit_s, start, seed: see `Solver.solve`.
        most_entries: largest table that variable elimination may make, in entries.
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
    known = prices.choice, prices.cost, prices.bound
    state = _State(problem, engine, goal, seed, deadline, *known, most_entries=most_entries)
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
        return state.answer()
    return state.close([marginal - prices.bound for marginal in prices.marginals])


@dataclass(eq=False)
class _State(_Known):
    """State of a reduced problem that bounds left open.

    Args:
        most_entries: see `solve_bounded`.
    """

    most_entries: int = MOST_ENTRIES

    def close(self, excess: Sequence[Array]) -> Solution:
        """Asks for the cheapest choice within a width of the bound that grows until the goal is reached.

        Args:
            excess: how much more than the bound each strategy costs at least.
        """
        low, keep = self.bound, _OPEN
        while self.cost > self.bound:
            if time.monotonic() >= self.deadline:
                return self.answer()
            width = min(self.cost - low, _width(excess, len(self.problem.nodes) + keep))
            answer = self.within(excess, width)
            if answer.choice:
                self.take(answer.choice, answer.objective)
            self.bound = max(self.bound, min(low + width, answer.lower_bound))
            if answer.status not in (Status.OPTIMAL, Status.INFEASIBLE):
                return self.answer()
            if width >= self.cost - low:
                break
            if self.goal.hopeless(self.bound) or (self.cost > self.bound and self.goal.reached(self.cost, self.bound)):
                return self.answer()
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
        most = _MOST_COLUMNS if self.problem.usages and not near else _FEW_COLUMNS
        if self.goal.gap > 0 and self.best is not None and reduction.problem.columns > most:
            return Solution(Status.UNKNOWN, (), math.inf, -math.inf, 0.0, name)
        left = None if math.isinf(self.deadline) else self.deadline - time.monotonic()
        begin = None if self.best is None else reduction.project(self.best)
        answer = solution_of(self.engine, reduction.problem, time_limit_s=left, start=begin, seed=self.seed)
        bound = answer.lower_bound + reduction.offset
        if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return replace(answer, lower_bound=bound)
        choice = reduction.lift(answer.choice)
        return replace(answer, choice=choice, objective=objective(self.problem, choice), lower_bound=bound)


def _width(excess: Sequence[Array], keep: int) -> float:
    """The width within which ``keep`` strategies lie; inf where all of them do."""
    every = np.sort(np.concatenate(list(excess)))
    return float(every[keep]) if keep < every.size else math.inf
