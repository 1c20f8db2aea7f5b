"""`HighsSolver`: the integer program, solved by HiGHS."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from autopar.solver.base import SolverError
from autopar.solver.evaluate import is_feasible, maximal_times, objective, within
from autopar.solver.integer_program import SCALED_COST, IntegerProgram, build_program
from autopar.solver.meter import Work
from autopar.solver.problem import ChoiceProblem
from autopar.solver.pulp_highs import HighsOutcome, run_highs
from autopar.solver.solution import Solution, Status

#: Nodes of a tree from which on a plan waits for its proof no longer. A guard that has decided nothing: of 48 calls in
#: 21 of the fixed plans each ended with 0 nodes or 1, for most problems are decided before a tree begins.
MOST_NODES = 10_000

# What HiGHS's tolerances may hide in a bound, in scaled cost.
_BOUND_TOLERANCE = SCALED_COST * 1e-10


@dataclass(frozen=True)
class HighsSolver:
    """Solves the whole integer program as it is given; `solve` adds presolve and lazy memory rows.

    Args:
        gap: relative gap, on the part of the cost that is open to choice, at which to stop; 0 wants the proof.
        max_nodes: of a branch-and-bound tree, after which to stop, however long they take: a limit that does not
            depend on how busy the machine is; None for no limit.
        open_cost: cost between a choice and the bound at which to stop; 0 wants the proof.
        restarts: whether HiGHS may start again with what its root has fixed, as it does where a proof is wanted.
    """

    gap: float = 0.0
    max_nodes: int | None = None
    open_cost: float = 0.0
    restarts: bool = True
    name = "highs"
    presolves = False

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """The best choice found, by the mixed-integer solver HiGHS. Raises `SolverError` where HiGHS itself fails."""
        began = time.monotonic()

        def done(status: Status, choice: tuple[int, ...], bound: float) -> Solution:
            cost = objective(problem, choice) if status in (Status.OPTIMAL, Status.FEASIBLE) else math.inf
            return Solution(status, choice, cost, min(bound, cost), time.monotonic() - began, self.name)

        program = build_program(problem)
        if not program.feasible or not within(0.0, problem.limit_bytes):
            return done(Status.INFEASIBLE, (), math.inf)
        best = start if start is not None and is_feasible(problem, start) else ()
        while True:
            left = None if time_limit_s is None else time_limit_s - (time.monotonic() - began)
            if left is not None and left <= 0:
                return done(Status.FEASIBLE if best else Status.UNKNOWN, best, _floor(program))
            begin = program.values(best) if best else None
            answer = run_highs(
                program,
                time_limit_s=left,
                start=begin,
                seed=seed,
                gap=self.gap,
                max_nodes=self.max_nodes,
                open_cost=self.open_cost * program.scale,
                restarts=self.restarts,
            )
            problem.meter.add(Work.MODELLED, program.costs.size)
            problem.meter.add(Work.PIVOTED, program.costs.size * answer.iterations)
            if answer.status == "failed":
                raise SolverError(f"HiGHS stopped with {answer.said!r} on {program.costs.size} columns")
            if answer.status == "infeasible":
                return done(Status.INFEASIBLE, (), math.inf)
            bound = _bound(program, answer)
            if answer.values is None:
                return done(Status.FEASIBLE if best else Status.UNKNOWN, best, bound)
            choice = program.choice(answer.values)
            cover = _broken_row(problem, choice)
            if cover:
                # Within HiGHS's tolerance the row held; exactly it does not.
                program = program.with_cover(cover)
                continue
            if math.isinf(objective(problem, choice)):
                raise SolverError(f"HiGHS's solution takes a forbidden pair ({answer.said})")
            if best and objective(problem, best) < objective(problem, choice):
                choice = best
            proven = answer.status == "optimal" and self.gap == 0.0 and self.open_cost == 0.0
            return done(Status.OPTIMAL if proven else Status.FEASIBLE, choice, bound)


def _floor(program: IntegerProgram) -> float:
    """The bound that needs no solving: every shifted cost is at least 0."""
    return program.offset


def _bound(program: IntegerProgram, answer: HighsOutcome) -> float:
    return program.offset + max(0.0, answer.bound - _BOUND_TOLERANCE) / program.scale


def _broken_row(problem: ChoiceProblem, choice: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The nodes, with their strategies, that together exceed the limit at some time; () where it holds always."""
    for at in maximal_times(problem.usages) if problem.limit_bytes is not None else ():
        live = [u for u in problem.usages if u.start <= at < u.stop and u.bytes[choice[u.node]] > 0]
        if not within(math.fsum(float(u.bytes[choice[u.node]]) for u in live), problem.limit_bytes):
            return tuple((v, choice[v]) for v in sorted({u.node for u in live}))
    return ()
