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

import numpy as np

from autopar.solver.base import Solver
from autopar.solver.cutting_planes import Planes
from autopar.solver.elimination import MOST_ENTRIES
from autopar.solver.evaluate import is_feasible, objective, within
from autopar.solver.goal import PROOF, Goal
from autopar.solver.messages import Messages
from autopar.solver.mixtures import mix
from autopar.solver.multipliers import Prices
from autopar.solver.presolve import reduce_problem
from autopar.solver.problem import Array, ChoiceProblem, Usage
from autopar.solver.restricted import eliminated
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

    def look(self, y: Array, near: float, deadline: float) -> float:
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
    """What `price_memory` gives, for problems too wide for elimination; its bounds are not as sharp.

    Args:
        problem: as `reduce_problem` makes it, with a limit.
        deadline: of `time.monotonic`, after which to go with what there is.
        engine: obeys memory.
        start: a choice, or None.
        seed: for the engine.
        most_entries: see `plan_elimination`.
        goal: when to stop.
    """
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    bare = replace(problem, usages=(), limit_bytes=None)
    rows = max(use.stop for use in problem.usages)
    planes = Planes(max(limit, 1.0), 1.0, _BOX)
    search = _WideSearch(problem, bare, limit, rows, most_entries, planes)
    if not within(float(_profile([(u, float(u.bytes.min())) for u in problem.usages], rows).max()), limit):
        return Prices(math.inf, None, math.inf, ())  # even every node's least at once is too much
    best_y = np.zeros(rows)
    bound = search.look(best_y, _FAR, deadline)
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
        low = search.look(y, near, deadline)
        if low <= bound and len(search.seen) == known:
            break
        if low > bound:
            bound, best_y = low, y
    messages = _messages(search, best_y, deadline)
    mix(search, messages.excess, bound, engine, deadline, seed, goal)
    slack = (constant := limit * float(best_y.sum())) + _ROUNDING * abs(constant)
    return Prices(bound, search.choice, search.cost, tuple(np.asarray(m - slack) for m in messages.marginals))


def _messages(search: _WideSearch, y: Array, deadline: float) -> Messages:
    """Messages at ``y``, for the min-marginals of L(y)."""
    messages = Messages.of(search.bare)
    messages.reprice(search.priced(y))
    for _ in range(_SWEEPS):
        if time.monotonic() > deadline and messages.sweeps > 2:
            break
        messages.sweep()
    return messages
