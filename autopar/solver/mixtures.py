"""The cheapest mixture of choices that are known, and of strategies that cost little more.

A look at the problem of these strategies alone comes first: it takes a tenth of a second, and where its gap is small
nothing else is asked. Else HiGHS is asked once, for what saves enough to be of use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from autopar.solver.base import Solver
from autopar.solver.goal import WIDE_GAP, Goal
from autopar.solver.highs import HighsSolver
from autopar.solver.presolve import Reduction
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.restricted import lowest, restricted
from autopar.solver.solution import Solution, Status

_MORE = (0, 300, 1200)  # strategies beyond one a node and those that some choice took; the last if no choice fits yet
_PATIENCE = 60  # nodes of HiGHS's tree for one mixture; no seconds, so that a busy machine gives the same answer
_LEAST_GAIN = 1e-3  # part of the cost that a mixture must save to be looked for: less is below what predictions err by


class Choices(Protocol):
    """Choices of a problem that are known.

    Attributes:
        problem: of which they are.
        choice: the cheapest that fits, or None.
        cost: its cost; inf where there is none.
        seen: all of them.
    """

    problem: ChoiceProblem
    choice: tuple[int, ...] | None
    cost: float
    seen: set[tuple[int, ...]]

    def take(self, choice: tuple[int, ...]) -> float:
        """Notes a choice; returns its cost."""


def mix(
    known: Choices, excess: Sequence[Array], bound: float, engine: Solver, deadline: float, seed: int, goal: Goal
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
        look = _looked(known, mixture, goal)
        if look is None:
            _solve(known, mixture, engine, deadline, seed, goal)
            if known.choice is not None and more > 0:
                return
        elif known.choice is not None and more > 0:
            # No mixture costs less than the look at it says.
            if look.status is not Status.OPTIMAL and not is_enough(look.lower_bound + mixture.offset):
                before = known.cost
                _solve(known, mixture, engine, deadline, seed, goal)
                if known.cost < before:  # trees find what HiGHS, which ends early, leaves open
                    _looked(known, _mixture(known, excess, more), goal)
            return
    if known.choice is None and mixture is not None:
        _solve(known, mixture, engine, deadline, seed, goal)


def _mixture(known: Choices, excess: Sequence[Array], more: int) -> Reduction:
    """The problem of strategies that some choice took, and of the ``more`` others of least ``excess``."""
    keep = lowest(excess, more)
    for choice in known.seen:
        for marks, k in zip(keep, choice, strict=True):
            marks[k] = True
    return restricted(known.problem, keep)


def _looked(known: Choices, mixture: Reduction, goal: Goal) -> Solution | None:
    """A look at a mixture, whose choice is noted; None where there are no compiled loops, which are needed for it."""
    if mixture.problem is None or not mixture.problem.nodes or find_spec("numba") is None:
        return None
    begin = None if known.choice is None else mixture.project(known.choice)
    # It loads numba, which takes longer than most problems.
    look: Solution = import_module("autopar.solver.look").first_look(
        mixture.problem, replace(goal, gap=_LEAST_GAIN).less(mixture.offset), start=begin
    )
    if look.choice:
        known.take(mixture.lift(look.choice))
    return look


def _solve(known: Choices, mixture: Reduction, engine: Solver, deadline: float, seed: int, goal: Goal) -> None:
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
    answer = engine.solve(mixture.problem, time_limit_s=left, start=begin, seed=seed)
    if answer.choice:
        known.take(mixture.lift(answer.choice))
