"""`LagrangeSolver`: large problems, with a bound, as well as the time allows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver.evaluate import is_feasible, objective, within
from autopar.solver.lagrange.branch import Branching
from autopar.solver.lagrange.contract import contract
from autopar.solver.lagrange.dual import Dual, ascend
from autopar.solver.lagrange.packed import Ints, Packed, lifted, pack, projected
from autopar.solver.lagrange.room import keep_what_fits
from autopar.solver.lagrange.search import Search
from autopar.solver.problem import ChoiceProblem, Edge, Node, Usage
from autopar.solver.solution import Solution, Status

_DUAL_PART = 0.25  # of the time that is left after packing
_BRANCH_PART = 0.6  # of the time that is left after that, where parts are bounded quickly
_BRANCHED = 30_000  # strategies up to which they are
_GAIN = 1.0 - 1e-6  # of whole costs
_NO_END = 1 << 30  # steps or rounds that only the time limit ends
_MARGIN_S = 0.4  # for what comes after the search, and
_MARGIN_PART = 0.5  # of the seconds that contraction and packing took


@dataclass(frozen=True)
class LagrangeSolver:
    """Nodes that follow others are taken out, memory is priced, messages bound, trees are searched.

    See `contract`, `dual`, `branch` and `trees` for what each does and where it is from. It proves an optimum only
    where cost and bound meet.

    Args:
        steps: of the ascent of the bound where there is no time limit.
        rounds: of the search where there is none.
        parts: of branch and bound where there is none.
    """

    steps: int = 3000
    rounds: int = 200
    parts: int = 100
    name = "lagrange"
    presolves = True

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """The best choice found, and a lower bound.

        Without a time limit the numbers of steps are fixed, and so is the answer.
        """
        clock = _PhaseClock()
        contracted = contract(problem)
        clock.lap("contract")
        infeasible = Solution(Status.INFEASIBLE, (), math.inf, math.inf, clock.seconds, self.name, clock.laps)
        if contracted is None or not within(0.0, problem.limit_bytes):
            return infeasible
        packed = pack(problem, contracted)
        clock.lap("pack")
        if math.isfinite(time_limit_s or math.inf):
            _load_loops(self)
            clock.lap("compile")
        margin_s = _MARGIN_S + _MARGIN_PART * sum(seconds for name, seconds in clock.laps if name != "compile")
        deadline = math.inf if time_limit_s is None else clock.began + time_limit_s - margin_s
        if not within(float(packed.memory.base.max(initial=0.0)), packed.memory.limit):
            return infeasible
        if not packed.nodes:
            choice, bound = np.zeros(0, dtype=np.int64), 0.0
            clock.lap("search")
        else:
            allowed = np.ones(packed.costs.size, dtype=np.bool_)
            if not keep_what_fits(packed.memory, packed.graph.first, allowed):
                return infeasible
            packed = replace(packed, costs=np.where(allowed, packed.costs, packed.forbidden))
            given = projected(contracted, packed, start) if start is not None else None
            gain = _GAIN if _is_whole(problem) else 0.0
            choice, bound = _PackedRun(self, packed, allowed, clock, deadline, seed).best(given, gain)
        whole = lifted(contracted, packed, choice)
        best = whole if is_feasible(problem, whole) else ()
        if start is not None and is_feasible(problem, start):
            best = start if not best or objective(problem, start) < objective(problem, best) else best
        cost = objective(problem, best) if best or not problem.nodes else math.inf
        bound = _whole(problem, bound + packed.constant)
        status = Status.UNKNOWN if math.isinf(cost) else Status.OPTIMAL if cost <= bound else Status.FEASIBLE
        clock.lap("check")
        return Solution(status, best, cost, min(bound, cost), clock.seconds, self.name, clock.laps)


@dataclass(frozen=True, eq=False)
class _PackedRun:
    """One search of a packed problem.

    Args:
        solver: its numbers of steps.
        packed: the problem.
        allowed: marks of the strategies that may fit.
        clock: takes the time.
        deadline: of `time.monotonic`.
        seed: of random numbers.
    """

    solver: LagrangeSolver
    packed: Packed
    allowed: NDArray[np.bool_]
    clock: _PhaseClock
    deadline: float
    seed: int

    def best(self, given: Ints | None, gain: float) -> tuple[Ints, float]:
        """The best choice found, whether or not it is allowed, and the bound, both of the packed problem.

        Args:
            given: a choice to begin from, or None.
            gain: least improvement that counts.
        """
        dual = Dual(self.packed, math.inf if self.packed.small else self.deadline)
        if given is not None:
            dual.note(given)
        dual.press(math.inf if self.packed.small else self.deadline)
        ascend(dual, self._until(_DUAL_PART), self.solver.steps if math.isinf(self.deadline) else _NO_END)
        self.clock.lap("bound")
        search = Search(self.packed, dual.best_prices, dual.messages, self.seed)
        bound = dual.bound
        if self.packed.costs.size <= _BRANCHED and dual.cost - dual.bound > gain:
            branching = Branching(self.packed, search, dual, gain, self.seed)
            parts = self.solver.parts if math.isinf(self.deadline) else _NO_END
            branching.run(self.allowed, self._until(_BRANCH_PART), parts)
            self.clock.lap("branch")
            bound = branching.bound
            if branching.choice is not None:
                dual.note(branching.choice)
        if dual.cost - bound <= gain:
            bound = dual.cost
        begin = dual.choice if dual.choice is not None else dual.nearest
        assert begin is not None
        rounds = self.solver.rounds if math.isinf(self.deadline) else _NO_END
        _, choice = search.run(begin, self.deadline, rounds, bound)
        self.clock.lap("search")
        return choice, bound

    def _until(self, part: float) -> float:
        now = time.monotonic()
        return now + part * (self.deadline - now)


def _load_loops(solver: LagrangeSolver) -> None:
    """Runs every loop once, on two nodes: compiling takes seconds where nothing is cached, and no phase should pay."""
    table = np.array([[0.0, 1.0], [2.0, 0.0]])
    nodes = (Node("a", np.array([0.0, 1.0])), Node("b", np.array([1.0, 0.0])))
    usages = (Usage(0, 0, 2, np.array([2.0, 1.0])), Usage(1, 1, 3, np.array([1.0, 2.0])))
    problem = ChoiceProblem(nodes, (Edge(0, 1, table),), usages, 3.0)
    replace(solver, steps=2, rounds=4).solve(problem)


class _PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.began = self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def laps(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


def _is_whole(problem: ChoiceProblem) -> bool:
    """Whether every cost is whole."""
    parts = [node.costs for node in problem.nodes] + [edge.costs for edge in problem.edges]
    return all((part[np.isfinite(part)] % 1.0 == 0.0).all() for part in parts)


def _whole(problem: ChoiceProblem, bound: float) -> float:
    """``bound`` rounded up where every cost is whole."""
    return float(math.ceil(bound - 1e-6)) if abs(bound) < 2.0**52 and _is_whole(problem) else bound
