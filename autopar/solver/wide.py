"""Problems too wide for elimination: messages bound them, elimination of few strategies finds and proves.

Messages (see `messages`) give a bound that climbs, and for each strategy how much more it seems to cost. Now and then

    find     the problem of the few strategies that cost least more is solved exactly: a choice
    prove    strategies whose min-marginal's bound exceeds the cost of the best choice are in no cheaper one; once
             so few are left that elimination takes them all, its answer is the optimum

Where neither ends it (the linear relaxation has a gap), bounds of all strategies are returned for a solver to finish.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.solver.elimination import MOST_ENTRIES
from autopar.solver.evaluate import objective
from autopar.solver.goal import PROOF, Goal
from autopar.solver.messages import Messages
from autopar.solver.multipliers import Prices
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.restricted import cheapest_within, lowest

_SWEEPS = 48  # between attempts; even
_ROUNDS = 60
_FEW = 300  # strategies beyond one a node in the first attempt at a choice
_REST = 2  # rounds without an attempt after one that found nothing better
_SHRUNK = 0.8  # part of the strategies at which it is worth to try again
_STALL = 0.02  # part of the gap; less progress than this in two rounds one after the other ends the ascent
_CLOSED = 1e-11  # relative gap that is rounding only


def climb(
    problem: ChoiceProblem,
    deadline: float = math.inf,
    start: tuple[int, ...] | None = None,
    most_entries: int = MOST_ENTRIES,
    goal: Goal = PROOF,
) -> Prices:
    """Bound, choice and bounds of min-marginals; the bound equals the cost where that is proven.

    Args:
        problem: reduced, without usages.
        deadline: of `time.monotonic`, after which to go with what there is.
        start: a choice that costs less than inf, or None.
        most_entries: largest table that variable elimination may make, in entries.
        goal: when to stop.
    """
    messages = Messages.of(problem)
    sizes = [node.costs.size for node in problem.nodes]
    labels = [np.arange(size) for size in sizes]
    best, cost = start, math.inf if start is None else objective(problem, start)
    bound, few, stalled, rest, tried = -math.inf, _FEW, 0, 0, sum(sizes) + 1.0
    for _ in range(_ROUNDS):
        before = bound
        for _ in range(_SWEEPS):
            messages.sweep()
        bound = max(bound, messages.bound)
        choice = tuple(int(node_labels[k]) for node_labels, k in zip(labels, messages.decode(), strict=True))
        if (lower_cost := objective(problem, choice)) < cost:
            best, cost = choice, lower_cost
        enough = goal.reached(cost, bound) or goal.hopeless(bound)
        if enough or time.monotonic() > deadline or _closed(cost, bound, messages.rounding):
            break
        if rest:
            rest -= 1
        else:
            answer = cheapest_within(problem, _marked(labels, sizes, lowest(messages.excess, few)), most_entries)
            few = max(few // 4, 1) if answer is None else few * 2
            if answer is not None and answer[0] < cost:
                cost, best = answer
            else:
                rest = _REST
        keep = [node_labels <= cost for node_labels in messages.marginals]
        if (left := sum(int(marks.sum()) for marks in keep)) <= _SHRUNK * tried:
            tried = left
            answer = cheapest_within(problem, _marked(labels, sizes, keep), most_entries)
            if answer is not None:
                cost, best = min((cost, best), answer, key=lambda priced: priced[0])
                bound = cost
                break
            kept = messages.restrict(keep)
            if kept is None:
                bound = cost  # nothing is cheaper than the choice at hand
                break
            labels = [node_labels[marks] for node_labels, marks in zip(labels, kept, strict=True)]
        stalled = stalled + 1 if bound - before <= _STALL * (cost - bound) else 0
        if stalled == 2:
            break
    if _closed(cost, bound, messages.rounding):
        bound = cost
    return Prices(min(bound, cost), best, cost, _spread(messages.marginals, labels, sizes))


def _closed(cost: float, bound: float, rounding: float) -> bool:
    """Whether what is between cost and bound may be rounding only."""
    return cost < math.inf and cost - bound <= _CLOSED * abs(cost) + 2 * rounding


def _marked(
    labels: Sequence[NDArray[np.int64]], sizes: Sequence[int], keep: Sequence[NDArray[np.bool_]]
) -> list[NDArray[np.bool_]]:
    """Marks among all strategies from marks among those that are left."""
    marked = []
    for node_labels, size, kept in zip(labels, sizes, keep, strict=True):
        marks = np.zeros(size, dtype=np.bool_)
        marks[node_labels[kept]] = True
        marked.append(marks)
    return marked


def _spread(marginals: Sequence[Array], labels: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> tuple[Array, ...]:
    """Bounds by strategy; inf for those that are in no choice worth having."""
    spread = []
    for node_marginals, label, size in zip(marginals, labels, sizes, strict=True):
        values = np.full(size, math.inf)
        values[label] = node_marginals
        spread.append(values)
    return tuple(spread)
