"""Memory in problems too wide for elimination: multipliers by cutting planes, each tried without memory.

For multipliers y the problem with memory priced has no memory rows: presolve and `wide` solve it, so L(y) of
`multipliers` comes with a choice that attains it, or nearly. Each choice is a plane over all y; the next y lies between
the best so far and the highest point under all planes (in-out separation: Wentges, Int. Trans. Opl. Res. 4, 1997). The
two bounds of max L meet. Choices on the way that fit are answers, and so is the best mixture of all of them (see
`mixtures`): the problem of the strategies that some choice took, and of those that messages say cost little more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import numpy as np

from autopar.solver.base import Solver, solution_of
from autopar.solver.elimination import MOST_ENTRIES
from autopar.solver.evaluate import is_feasible, objective, within
from autopar.solver.goal import PROOF, WIDE_GAP, Goal
from autopar.solver.highs import HighsSolver
from autopar.solver.integer_program import IntegerProgram, Row
from autopar.solver.messages import Messages
from autopar.solver.multipliers import Prices
from autopar.solver.presolve import Reduction, reduce_problem
from autopar.solver.problem import Array, ChoiceProblem, Usage
from autopar.solver.pulp_highs import run_highs
from autopar.solver.restricted import eliminated, lowest, restricted
from autopar.solver.solution import Solution, Status
from autopar.solver.wide import climb

_SWEEPS = 48  # for the min-marginals at the best y
_TRIES = 25  # values of y
# Relative gap to which the problem of one y is solved: least, most, and as part of what is open.
_NEAR, _FAR, _PART = 1e-5, 1e-3, 0.1
_STEP = 0.7  # of the way from the best y to the highest point under the planes; with one row all of it
_BOX, _GROWTH = 0.05, 4.0
_MET = 5e-5  # relative distance of the two bounds of max L at which to stop
_ROUNDING = 1e-12


@dataclass(eq=False)
class _WideSearch:
    """Choices of a problem that are known, and the planes that they make.

    Args:
        problem: of which they are.
        bare: it without memory.
        limit: bytes.
        rows: of memory.
        most_entries: see `price_wide`.
        planes: of the choices.
        choice: the cheapest that fits, or None.
        cost: its cost; inf where there is none.
        seen: all of them.
    """

    problem: ChoiceProblem
    bare: ChoiceProblem
    limit: float
    rows: int
    most_entries: int
    planes: Planes
    choice: tuple[int, ...] | None = None
    cost: float = math.inf
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def priced(self, y: Array) -> list[Array]:
        """Node costs with memory priced."""
        sums = np.concatenate([[0.0], np.cumsum(y)])
        costs = [node.costs for node in self.problem.nodes]
        for use in self.problem.usages:
            price = float(sums[use.stop] - sums[use.start])
            if price > 0:
                costs[use.node] = costs[use.node] + price * use.bytes
        return costs

    def used(self, choice: Sequence[int]) -> Array:
        """Bytes by row."""
        return _profile([(use, float(use.bytes[choice[use.node]])) for use in self.problem.usages], self.rows)

    def take(self, choice: tuple[int, ...]) -> float:
        """Note a choice; returns its cost."""
        cost = objective(self.bare, choice)
        if choice in self.seen or math.isinf(cost):
            return cost
        self.seen.add(choice)
        used = self.used(choice)
        self.planes.add(cost, used)
        if cost < self.cost and within(float(used.max()), self.limit):
            self.choice, self.cost = choice, cost
        return cost

    def bound_at(self, y: Array, near: float, deadline: float) -> float:
        """A lower bound of L(y), to a relative ``near`` where that is reached; notes the choice that attains it."""
        nodes = tuple(replace(n, costs=c) for n, c in zip(self.bare.nodes, self.priced(y), strict=True))
        reduction = reduce_problem(replace(self.bare, nodes=nodes))
        if reduction.problem is None:
            return math.inf
        inner = eliminated(reduction, self.most_entries)
        if inner is None:
            prices = climb(reduction.problem, deadline, None, self.most_entries, Goal(near))
            inner, bound = prices.choice, prices.bound + reduction.offset
        else:
            bound = objective(reduction.problem, inner) + reduction.offset
        if inner is not None:
            self.take(reduction.lift(inner))
        constant = self.limit * float(y.sum())
        return bound - constant - _ROUNDING * (abs(bound) + abs(constant))


def _profile(held: Sequence[tuple[Usage, float]], rows: int) -> Array:
    """Bytes by row of usages that hold so much."""
    change = np.zeros(rows + 1)
    for use, size in held:
        change[use.start] += size
        change[use.stop] -= size
    return np.cumsum(change)[:rows]


def price_wide(
    problem: ChoiceProblem,
    engine: Solver,
    deadline: float = math.inf,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
    most_entries: int = MOST_ENTRIES,
    goal: Goal = PROOF,
) -> Prices:
    """Lagrange multipliers of memory rows, and the bound that they prove, where elimination takes too much memory.

    Cutting planes find the multipliers. Their bounds are not as sharp as those by elimination.

    Args:
        problem: without redundant nodes and rows, and with a memory limit.
        engine: solver that finds choices within the limit.
        deadline: reading of `time.monotonic` at which the best so far is returned.
        start: a known choice, or None.
        seed: of the engine's random numbers.
        most_entries: largest table that elimination may make, in entries.
        goal: relative gap, or bound, at which to stop.
    """
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    bare = replace(problem, usages=(), limit_bytes=None)
    rows = max(use.stop for use in problem.usages)
    planes = Planes(max(limit, 1.0), 1.0, _BOX)
    search = _WideSearch(problem, bare, limit, rows, most_entries, planes)
    if not within(float(_profile([(u, float(u.bytes.min())) for u in problem.usages], rows).max()), limit):
        return Prices(math.inf, None, math.inf, ())  # even every node's least at once is too much
    best_y = np.zeros(rows)
    bound = search.bound_at(best_y, _FAR, deadline)
    if math.isinf(bound) and bound > 0:
        return Prices(math.inf, None, math.inf, ())
    if start is not None and is_feasible(problem, start):
        search.take(start)
    planes.scale = max((abs(cost) for cost in planes.costs), default=1.0) or 1.0
    for _ in range(_TRIES):
        enough = goal.reached(search.cost, bound) or goal.hopeless(bound)
        if enough or time.monotonic() > deadline or not planes.rows:
            break
        top = planes.highest(bound)
        if top is None or (top[0] - bound <= _MET * planes.scale and not planes.at_the_box(top[1])):
            break
        y = best_y + (1.0 if len(planes.rows) == 1 else _STEP) * (top[1] - best_y)
        if planes.at_the_box(top[1]):
            planes.box *= _GROWTH
        known = len(search.seen)
        near = min(_FAR, max(_NEAR, _PART * (top[0] - bound) / planes.scale))
        low = search.bound_at(y, near, deadline)
        if low <= bound and len(search.seen) == known:
            break
        if low > bound:
            bound, best_y = low, y
    messages = _messages(search, best_y, deadline)
    mix(search, messages.excess, bound, engine, deadline, seed, goal)
    offset = (constant := limit * float(best_y.sum())) + _ROUNDING * abs(constant)
    return Prices(bound, search.choice, search.cost, tuple(np.asarray(m - offset) for m in messages.marginals))


def _messages(search: _WideSearch, y: Array, deadline: float) -> Messages:
    """Messages at ``y``, for the min-marginals of L(y)."""
    messages = Messages.of(search.bare)
    messages.reprice(search.priced(y))
    for _ in range(_SWEEPS):
        if time.monotonic() > deadline and messages.sweeps > 2:
            break
        messages.sweep()
    return messages


_ROWS_A_PLANE = 6


@dataclass(eq=False)
class Planes:
    """Cutting planes of the Lagrangian dual, one for each choice.

    A choice bounds the dual by its cost plus the sum over rows of multiplier times its bytes above the limit.

    Args:
        limit: bytes, more than 0.
        scale: a typical cost; multipliers are in units of scale / limit inside the program.
        box: largest multiplier in those units.
        costs: cost of each choice.
        used: bytes of each choice, by row.
        rows: those that have a multiplier, increasing.
    """

    limit: float
    scale: float
    box: float
    costs: list[float] = field(default_factory=list)
    used: list[Array] = field(default_factory=list)
    rows: tuple[int, ...] = ()

    def add(self, cost: float, used: Array) -> None:
        """Adds the plane of a choice.

        Rows in which its memory has a local maximum above the limit get a multiplier, the highest of them first.

        Args:
            cost: of the choice.
            used: its bytes, by row.
        """
        self.costs.append(cost)
        self.used.append(used)
        over = [t for t in range(used.size) if not within(float(used[t]), self.limit)]
        peaks = [
            t for t in over
            if (t == 0 or used[t] > used[t - 1]) and (t + 1 == used.size or used[t] >= used[t + 1])
        ]  # fmt: skip
        peaks.sort(key=lambda t: (-used[t], t))
        self.rows = tuple(sorted({*self.rows, *peaks[:_ROWS_A_PLANE]}))

    def highest(self, floor: float) -> tuple[float, Array] | None:
        """The largest value that all planes allow, at least ``floor`` (a known bound), and its y by row.

        Returns None where HiGHS finds none.
        """
        rows = []
        for cost, used in zip(self.costs, self.used, strict=True):
            slopes = 1.0 - used[list(self.rows)] / self.limit
            values = np.concatenate([[1.0], slopes])
            some = np.flatnonzero(values)
            rows.append(Row(some, values[some], -math.inf, max(0.0, cost - floor) / self.scale))
        count = len(self.rows)
        costs, upper = np.zeros(count + 1), np.full(count + 1, self.box)
        costs[0], upper[0] = -1.0, math.inf
        first = np.zeros(1, dtype=np.int64)
        program = IntegerProgram(costs, upper, 0, tuple(rows), first, (), 0.0, 1.0)
        answer = run_highs(program, time_limit_s=None, start=None, seed=0, gap=0.0)
        if answer.values is None:
            return None
        y = np.zeros(self.used[0].size)
        y[list(self.rows)] = np.maximum(answer.values[1:], 0.0) * self.scale / self.limit
        return floor + float(answer.values[0]) * self.scale, y

    def at_the_box(self, y: Array) -> bool:
        """Whether some multiplier is as large as the box lets it be."""
        return bool((y * self.limit / self.scale >= self.box * (1 - 1e-6)).any())


_MORE = (0, 300, 1200)  # strategies beyond one a node and those that some choice took; the last if no choice fits yet
_PATIENCE = 60  # nodes of HiGHS's tree for one mixture; no seconds, so that a busy machine gives the same answer
_LEAST_GAIN = 1e-3  # part of the cost that a mixture must save to be looked for: less is below what predictions err by


def mix(
    known: _WideSearch, excess: Sequence[Array], bound: float, engine: Solver, deadline: float, seed: int, goal: Goal
) -> None:  # fmt: skip
    """Notes cheap mixtures of the choices that are known.

    Args:
        known: those choices.
        excess: how much more than the bound each strategy costs at least.
        bound: no choice costs less.
        engine: obeys memory.
        deadline: of `time.monotonic`, after which to go with what there is.
        seed: for the engine.
        goal: when to stop.
    """

    def is_enough(least: float) -> bool:
        reached = goal.reached(known.cost, least) or replace(goal, gap=WIDE_GAP).reached(known.cost, least)
        return reached or goal.hopeless(least) or (known.choice is not None and goal.saves_little(least, WIDE_GAP))

    mixture: Reduction | None = None
    for more in _MORE:
        if is_enough(bound) or time.monotonic() > deadline:
            return
        mixture = _mixture(known, excess, more)
        relaxed = _relaxed(known, mixture, goal)
        if relaxed is None:
            _solve(known, mixture, engine, deadline, seed, goal)
            if known.choice is not None and more > 0:
                return
        elif known.choice is not None and more > 0:
            # No mixture costs less than its relaxation says.
            if relaxed.status is not Status.OPTIMAL and not is_enough(relaxed.lower_bound + mixture.offset):
                before = known.cost
                _solve(known, mixture, engine, deadline, seed, goal)
                if known.cost < before:  # trees find what HiGHS, which ends early, leaves open
                    _relaxed(known, _mixture(known, excess, more), goal)
            return
    if known.choice is None and mixture is not None:
        _solve(known, mixture, engine, deadline, seed, goal)


def _mixture(known: _WideSearch, excess: Sequence[Array], more: int) -> Reduction:
    """The problem of strategies that some choice took, and of the ``more`` others of least ``excess``."""
    keep = lowest(excess, more)
    for choice in known.seen:
        for marks, k in zip(keep, choice, strict=True):
            marks[k] = True
    return restricted(known.problem, keep)


def _relaxed(known: _WideSearch, mixture: Reduction, goal: Goal) -> Solution | None:
    """The relaxation of a mixture, whose choice is noted; None where nothing is left to choose."""
    if mixture.problem is None or not mixture.problem.nodes:
        return None
    begin = None if known.choice is None else mixture.project(known.choice)
    # It loads numba, which takes longer than most problems.
    relaxed: Solution = import_module("autopar.solver.relaxation").solve_relaxed(
        mixture.problem, replace(goal, gap=_LEAST_GAIN).less(mixture.offset), start=begin
    )
    if relaxed.choice:
        known.take(mixture.lift(relaxed.choice))
    return relaxed


def _solve(known: _WideSearch, mixture: Reduction, engine: Solver, deadline: float, seed: int, goal: Goal) -> None:
    """Notes the cheapest choice of a mixture.

    HiGHS ends where what it leaves open is of no use: it saves too little, or costs more than the goal's cutoff.
    """
    if mixture.problem is None:
        return
    if not mixture.problem.nodes:
        known.take(mixture.lift(()))
        return
    left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
    if isinstance(engine, HighsSolver):
        useless = 0.0 if known.choice is None else goal.over(known.cost, _LEAST_GAIN)
        engine = replace(engine, max_nodes=_PATIENCE, open_cost=useless, restarts=False)
    begin = None if known.choice is None else mixture.project(known.choice)
    answer = solution_of(engine, mixture.problem, time_limit_s=left, start=begin, seed=seed)
    if answer.choice:
        known.take(mixture.lift(answer.choice))
