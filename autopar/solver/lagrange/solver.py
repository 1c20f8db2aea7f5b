"""`LagrangeSolver`: large problems, with a bound, as well as the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.base import Capabilities
from autopar.solver.evaluate import is_feasible, objective, within
from autopar.solver.lagrange.contract import Contracted, contract
from autopar.solver.lagrange.dual import Dual, ascend
from autopar.solver.lagrange.packed import Ints, Packed, pack
from autopar.solver.lagrange.search import Search
from autopar.solver.problem import ChoiceProblem, Edge, Node, Usage
from autopar.solver.solution import Solution, Status

_DUAL_PART = 0.25  # of the time that is left after packing
_NO_END = 1 << 30  # steps or rounds that only the time limit ends
_MARGIN_S = 0.4  # for what comes after the search, and
_MARGIN_PART = 0.5  # of the seconds that contraction and packing took


@dataclass(frozen=True)
class LagrangeSolver:
    """Nodes that follow others are taken out, memory is priced, messages bound, trees are searched.

    See `contract`, `dual` and `trees` for what each does and where it is from. It proves an optimum only where cost
    and bound meet. With the extra ``fast`` (numba) it is some hundred times as fast.

    Args:
        steps: of the ascent of the bound where there is no time limit.
        rounds: of the search where there is none.
    """

    steps: int = 3000
    rounds: int = 200

    @property
    def name(self) -> str:
        """``lagrange``."""
        return "lagrange"

    @property
    def capabilities(self) -> Capabilities:
        """Anytime, with memory, any size."""
        return Capabilities(exact=False, memory=True, anytime=True, seeded=True, presolves=True)

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """See `Solver.solve`. Without a time limit the numbers of steps are fixed, and so is the answer."""
        clock = _Clock()
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
            given = _projected(contracted, packed, start) if start is not None else None
            choice, bound = self._search(packed, given, clock, deadline, seed)
        lifted = _lifted(contracted, packed, choice)
        best = lifted if is_feasible(problem, lifted) else ()
        if start is not None and is_feasible(problem, start):
            best = start if not best or objective(problem, start) < objective(problem, best) else best
        cost = objective(problem, best) if best or not problem.nodes else math.inf
        bound = _whole(problem, bound + packed.constant)
        status = Status.UNKNOWN if math.isinf(cost) else Status.OPTIMAL if cost <= bound else Status.FEASIBLE
        clock.lap("check")
        return Solution(status, best, cost, min(bound, cost), clock.seconds, self.name, clock.laps)

    def _search(
        self, packed: Packed, given: Ints | None, clock: _Clock, deadline: float, seed: int
    ) -> tuple[Ints, float]:
        """The best choice found, whether or not it is allowed, and the bound, both of the packed problem."""
        dual = Dual(packed)
        if given is not None:
            dual.note(given)
        now = time.monotonic()
        until = now + _DUAL_PART * (deadline - now)
        dual.press(math.inf if packed.small else deadline)
        ascend(dual, until, self.steps if math.isinf(deadline) else _NO_END)
        clock.lap("bound")
        begin = dual.choice if dual.choice is not None else dual.nearest
        assert begin is not None
        rounds = self.rounds if math.isinf(deadline) else _NO_END
        search = Search(packed, dual.best_prices, dual.messages, seed)
        _, choice = search.run(begin, deadline, rounds, dual.bound)
        clock.lap("search")
        return choice, dual.bound


def _load_loops(solver: LagrangeSolver) -> None:
    """Runs every loop once, on two nodes: compiling takes seconds where nothing is cached, and no phase should pay."""
    table = np.array([[0.0, 1.0], [2.0, 0.0]])
    nodes = (Node("a", np.array([0.0, 1.0])), Node("b", np.array([1.0, 0.0])))
    usages = (Usage(0, 0, 2, np.array([2.0, 1.0])), Usage(1, 1, 3, np.array([1.0, 2.0])))
    problem = ChoiceProblem(nodes, (Edge(0, 1, table),), usages, 3.0)
    replace(solver, steps=2, rounds=4).solve(problem)


class _Clock:
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


def _lifted(contracted: Contracted, packed: Packed, choice: Ints) -> tuple[int, ...]:
    """The choice for the original problem."""
    chosen = dict(zip(packed.nodes, choice.tolist(), strict=True))
    return tuple(
        int(strategies[chosen.get(leader, 0)])
        for leader, strategies in zip(contracted.leader, contracted.strategies, strict=True)
    )


def _projected(contracted: Contracted, packed: Packed, choice: Sequence[int]) -> Ints | None:
    """The packed choice that lifts to ``choice``; None where there is none."""
    if len(choice) != len(contracted.leader):
        return None
    found = []
    for v in packed.nodes:
        same = np.flatnonzero(contracted.strategies[v] == choice[v])
        if not same.size:
            return None
        found.append(int(same[0]))
    made = np.array(found, dtype=np.int64)
    return made if _lifted(contracted, packed, made) == tuple(choice) else None


def _whole(problem: ChoiceProblem, bound: float) -> float:
    """``bound`` rounded up where every cost is whole."""
    parts = [node.costs for node in problem.nodes] + [edge.costs for edge in problem.edges]
    whole = all((part[np.isfinite(part)] % 1.0 == 0.0).all() for part in parts)
    return float(math.ceil(bound - 1e-6)) if whole and abs(bound) < 2.0**52 else bound
