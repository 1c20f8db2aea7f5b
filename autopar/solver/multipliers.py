"""Lagrange multipliers on memory rows: a bound, feasible choices, and the price of every strategy.

For multipliers y >= 0, one a row,

    L(y) = min_s  cost(s) + sum_t y_t (use_t(s) - limit)    <=    the least cost of a choice that fits

and the minimum is one elimination, without memory. So is the min-marginal L(y)[v,k], which bounds every choice that
takes strategy k of node v: where it exceeds the cost of a known choice, k is in no optimum. (Geoffrion, Math. Prog.
Study 2, 1974; Held and Karp for the search.)
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.elimination import Elimination
from autopar.solver.evaluate import objective, within
from autopar.solver.goal import PROOF, Goal
from autopar.solver.problem import Array, ChoiceProblem

_SWEEPS = 3  # over all rows
_STEPS = 25  # for one row; each halves at least what is unknown, and most rows need five
_GROWTH = 8.0
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Prices:
    """Result of the search for multipliers.

    Args:
        bound: no choice that fits costs less.
        choice: the cheapest that fits among those seen; None where none did.
        cost: its cost; inf where there is none.
        marginals: for each node and strategy, no choice that fits and takes it costs less.
    """

    bound: float
    choice: tuple[int, ...] | None
    cost: float
    marginals: tuple[Array, ...]


@dataclass(eq=False)
class _MultiplierSearch:
    problem: ChoiceProblem
    elimination: Elimination
    limit: float
    deadline: float
    usages: dict[tuple[int, int], Array]  # by (row, node)
    rows: tuple[int, ...]
    bound: float = -math.inf
    multipliers: dict[int, float] = field(default_factory=dict)
    choice: tuple[int, ...] | None = None
    cost: float = math.inf

    def costs(self, y: dict[int, float]) -> list[Array]:
        """Node costs with memory priced."""
        priced = [node.costs for node in self.problem.nodes]
        for (row, v), used in self.usages.items():
            if y[row] > 0:
                priced[v] = priced[v] + y[row] * used
        return priced

    def value(self, y: dict[int, float]) -> tuple[float, dict[int, float], float]:
        """L(y), how far each row's use exceeds the limit, and the cost, of the choice that attains it."""
        least, choice, _ = self.elimination.least(self.costs(y))
        over = dict.fromkeys(self.rows, -self.limit)
        for (row, v), used in self.usages.items():
            over[row] += float(used[choice[v]])
        cost = objective(self.problem, choice)
        if cost < self.cost and all(within(excess + self.limit, self.limit) for excess in over.values()):
            self.choice, self.cost = choice, cost
        bound = least - math.fsum(y[row] * self.limit for row in self.rows)
        if bound > self.bound:
            self.bound, self.multipliers = bound, dict(y)
        return bound, over, cost

    def improve(self, row: int) -> None:
        """Maximize L over one multiplier: it is concave and piecewise linear with slopes ``over[row]``."""
        y = dict(self.multipliers)
        y[row] = 0.0
        low_y, (low, over, _) = 0.0, self.value(y)
        low_slope = over[row]
        if low_slope <= 0:
            return
        high_y = self.multipliers[row] or max(abs(low), 1e-30) / max(self.limit, 1.0) / _GROWTH
        for _ in range(_STEPS):
            if time.monotonic() > self.deadline:
                return
            y[row] = high_y
            high, over, _ = self.value(y)
            high_slope = over[row]
            if high_slope <= 0:
                break
            low_y, low, low_slope = high_y, high, high_slope
            high_y *= _GROWTH
        else:
            return
        for _ in range(_STEPS):
            # Where the two supporting lines meet, L is at most this high.
            y[row] = (high - low + low_slope * low_y - high_slope * high_y) / (low_slope - high_slope)
            if not low_y < y[row] < high_y or time.monotonic() > self.deadline:
                return
            crossing = low + low_slope * (y[row] - low_y)
            middle, over, _ = self.value(y)
            if middle >= crossing - 1e-12 * abs(crossing):
                return
            if over[row] > 0:
                low_y, low, low_slope = y[row], middle, over[row]
            else:
                high_y, high, high_slope = y[row], middle, over[row]


def price_memory(
    problem: ChoiceProblem, elimination: Elimination, deadline: float = math.inf, goal: Goal = PROOF
) -> Prices:
    """Lagrange multipliers of memory rows, and the bound that they prove, by search along one row after the other.

    Args:
        problem: without redundant nodes and rows: times are numbers of rows, and a node's usages do not overlap.
        elimination: order in which the nodes of ``problem`` are eliminated.
        deadline: reading of `time.monotonic` at which the best so far is returned.
        goal: relative gap, or bound, at which to stop.
    """
    usages = {(row, use.node): use.bytes for use in problem.usages for row in range(use.start, use.stop)}
    rows = tuple(sorted({row for row, _ in usages}))
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    search = _MultiplierSearch(problem, elimination, limit if rows else 0.0, deadline, usages, rows)
    search.multipliers = dict.fromkeys(rows, 0.0)
    search.value(search.multipliers)
    if math.isinf(search.bound):
        return Prices(math.inf, None, math.inf, ())
    for _ in range(_SWEEPS):
        before = search.bound
        for row in rows:
            if goal.reached(search.cost, search.bound) or goal.hopeless(search.bound):
                break
            search.improve(row)
        if len(rows) < 2 or search.bound <= before + 1e-9 * abs(before):
            break
    least, _, tables = elimination.least(search.costs(search.multipliers))
    marginals = elimination.marginals(least, tables)
    constant = math.fsum(search.multipliers[row] * search.limit for row in rows)
    # L is a difference of sums: what rounding may have added to it is taken off again.
    rounding = _ROUNDING * (abs(least) + abs(constant))
    prices = tuple(np.asarray(m - constant - rounding) for m in marginals)
    return Prices(search.bound - rounding, search.choice, search.cost, prices)
