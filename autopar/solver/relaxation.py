"""Lagrangian relaxation of a problem: a choice and a bound in milliseconds, before anything is proven.

Nodes that follow others are taken out (`lagrange.contract`), memory is priced by multipliers, messages bound
(`lagrange.dual`), and now and then the cheapest choice that an ascent decoded is improved by trees
(`lagrange.search`). Everything is counted in steps, so that the same problem gives the same answer on any load. The
relaxation leaves a gap, and `solve` closes it where it is wide enough to matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.evaluate import is_feasible, objective, within
from autopar.solver.goal import PROOF, Goal
from autopar.solver.lagrange.contract import contract
from autopar.solver.lagrange.dual import Dual
from autopar.solver.lagrange.packed import Ints, lifted, pack, projected
from autopar.solver.lagrange.room import keep_what_fits
from autopar.solver.lagrange.search import Search
from autopar.solver.problem import ChoiceProblem
from autopar.solver.solution import Solution, Status

#: Name of the relaxation among solvers.
RELAXATION = "relaxation"

_STEPS = 400  # of the ascent
_ROUND = 25  # steps between improvements by trees
_MOVES = 400  # trees of an improvement
_LAST = 6  # improvements by other random numbers, of a gap that is left
_PROGRESS = 0.02  # part of the gap; rounds in which less of it is closed
_STALLED = 4  # so many of them one after the other end the ascent, after
_SURE = 150  # steps where memory has prices: until these are found the bound hardly moves


def solve_relaxed(
    problem: ChoiceProblem, goal: Goal = PROOF, *, start: tuple[int, ...] | None = None, steps: int = _STEPS
) -> Solution:
    """A choice and a bound.

    Args:
        problem: with its memory limit or without one.
        goal: when to stop early: the gap is small enough, or the bound is above the cutoff.
        start: a choice to begin from; the answer is never worse than a feasible one.
        steps: of the ascent at most.

    Returns:
        OPTIMAL or INFEASIBLE where that is proven on the way, else FEASIBLE, or UNKNOWN without a choice.
    """
    began = time.monotonic()

    def answer(status: Status, choice: tuple[int, ...], bound: float) -> Solution:
        cost = objective(problem, choice) if status in (Status.OPTIMAL, Status.FEASIBLE) else math.inf
        return Solution(status, choice, cost, min(bound, cost), time.monotonic() - began, RELAXATION)

    contracted = contract(problem)
    if contracted is None or not within(0.0, problem.limit_bytes):
        return answer(Status.INFEASIBLE, (), math.inf)
    packed = pack(problem, contracted)
    if not within(float(packed.memory.base.max(initial=0.0)), packed.memory.limit):
        return answer(Status.INFEASIBLE, (), math.inf)
    if not packed.nodes:
        choice = lifted(contracted, packed, np.zeros(0, dtype=np.int64))
        return answer(Status.OPTIMAL, choice, objective(problem, choice))
    allowed = np.ones(packed.costs.size, dtype=np.bool_)
    if not keep_what_fits(packed.memory, packed.graph.first, allowed):
        return answer(Status.INFEASIBLE, (), math.inf)
    packed = replace(packed, costs=np.where(allowed, packed.costs, packed.forbidden))
    dual = Dual(packed)
    if start is not None and (begin := projected(contracted, packed, start)) is not None:
        dual.note(begin)
    _Ascent(dual, goal.less(packed.constant)).run(steps)
    bound = max(dual.bound + packed.constant, goal.least)
    best = () if dual.choice is None else lifted(contracted, packed, dual.choice)
    best = _better(problem, best, start)
    if not best:
        return answer(Status.UNKNOWN, (), bound)
    return answer(Status.OPTIMAL if objective(problem, best) <= bound else Status.FEASIBLE, best, bound)


def _better(problem: ChoiceProblem, choice: tuple[int, ...], other: Sequence[int] | None) -> tuple[int, ...]:
    """The cheaper of two choices that are feasible; () where none is."""
    feasible = [tuple(c) for c in (choice, other) if c and is_feasible(problem, tuple(c))]
    return min(feasible, key=lambda c: objective(problem, c), default=())


@dataclass(eq=False)
class _Ascent:
    """The ascent of the bound and the descent of the cost.

    Args:
        dual: what ascends.
        goal: when to stop, in costs of the packed problem.
        polished: improvements so far.
    """

    dual: Dual
    goal: Goal
    polished: int = 0

    def run(self, steps: int) -> None:
        """Steps until the goal is reached or hopeless, rounds stall, or so many are made."""
        dual = self.dual
        dual.press(math.inf)
        stalled, last = 0, -1.0
        sure = _SURE if dual.packed.memory.base.size else 0
        while dual.steps < steps and stalled < _STALLED:
            before, cost = dual.bound, dual.cost
            for _ in range(_ROUND):
                dual.step()
                if self._done():
                    return
            if dual.choice is not None and dual.cost != last:
                self._polish(dual.choice)
                last = dual.cost
                if self._done():
                    return
            closed = (dual.bound - before) + (cost - dual.cost if math.isfinite(cost) else math.inf)
            stalled = stalled + 1 if dual.steps > sure and closed <= _PROGRESS * (dual.cost - dual.bound) else 0

        for _ in range(_LAST):
            if dual.choice is not None:
                self._polish(dual.choice)
            if self._done():
                return

    def _done(self) -> bool:
        dual = self.dual
        return self.goal.reached(dual.cost, dual.bound) or self.goal.hopeless(dual.bound)

    def _polish(self, choice: Ints) -> None:
        """Notes the cheapest choice that trees lead to."""
        dual = self.dual
        search = Search(dual.packed, dual.best_prices, dual.messages, 0)
        self.polished += 1
        random = np.random.default_rng((7, self.polished))
        cost, better = search.polished(choice, dual.best_prices, _MOVES, random)
        if cost < dual.cost:
            dual.choice, dual.cost = better.copy(), cost
