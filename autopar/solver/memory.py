"""Memory rows added only where they bind, and the least memory that would do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solver.base import SolverError
from autopar.solver.evaluate import maximal_times, peak_bytes, profile, usage_profile, within
from autopar.solver.integer_program import least_peak_program
from autopar.solver.presolve import reduce_problem
from autopar.solver.problem import Array, ChoiceProblem, Usage
from autopar.solver.pulp_highs import run_highs

_ROWS_A_ROUND = 6
_PEAK_TOLERANCE = 1e-9  # relative; what HiGHS's tolerances leave open about the least peak


def broken_times(
    problem: ChoiceProblem, choice: tuple[int, ...], limit_bytes: float | None, most: int = _ROWS_A_ROUND
) -> tuple[int, ...]:
    """Some times at which ``choice`` exceeds ``limit_bytes``, the worst first; () where it holds.

    Only times whose live set is maximal are given, only peaks (no neighbouring such time holds more), and at
    most ``most`` of them: neighbouring rows say nearly the same, and each makes the program heavier.
    """
    times, held = usage_profile(problem, choice)
    candidates = np.array(maximal_times(problem.usages), dtype=np.int64)
    used = held[np.searchsorted(times, candidates)]
    over = [i for i in range(used.size) if not within(float(used[i]), limit_bytes)]
    peaks = [i for i in over if (i == 0 or used[i] > used[i - 1]) and (i + 1 == used.size or used[i] >= used[i + 1])]
    peaks.sort(key=lambda i: (-used[i], i))
    return tuple(int(candidates[i]) for i in peaks[:most])


def memory_floor(problem: ChoiceProblem) -> float:
    """Bytes below which no choice stays: at each time every node by itself holds as little as it can.

    max_t sum_{v live at t} min_s usage[v][s] over the strategies s that are not forbidden; 0 without usages, inf where
    all strategies of a node are. Choices that must fit each other may need more (see `least_memory`).
    """
    allowed = [np.isfinite(node.costs) for node in problem.nodes]
    if not all(a.any() for a in allowed):
        return math.inf
    least = [float(u.bytes[allowed[u.node]].min()) for u in problem.usages]
    return float(profile(problem.usages, least)[1].max(initial=0.0))


def evenly_split_bytes(usages: Sequence[Usage], devices: int) -> float:
    """Bytes a device that the usages need at some time at least, on any mesh of so many devices.

    A usage takes at least an equal piece of what it takes where it is whole, and nothing where some strategy takes
    nothing: max_t sum_{v live at t} min(min_s usage[v][s], max_s usage[v][s] / devices).

    Args:
        usages: of a problem on one mesh, whatever the costs of its strategies.
        devices: of the mesh.
    """
    arrays = {id(u.bytes): u.bytes for u in usages}  # many share one
    least = {identity: float(min(bytes.min(), bytes.max() / devices)) for identity, bytes in arrays.items()}
    return float(profile(usages, [least[id(u.bytes)] for u in usages])[1].max(initial=0.0))


def least_memory(
    problem: ChoiceProblem, *, time_limit_s: float | None = None, seed: int = 0
) -> tuple[float, tuple[int, ...]]:
    """The least peak of any choice that takes nothing forbidden, whatever it costs.

    minimize max_t sum_{v live at t} usage[v][s_v], with rows added at the times that the answer so far breaks;
    each round's optimum is a lower bound, so the first whose choice holds no more anywhere is the least.

    Args:
        problem: its limit does not matter.
        time_limit_s: seconds after which the best so far is returned, which then need not be the least; None waits.
        seed: of HiGHS's random numbers.

    Returns:
        Bytes, within a relative 1e-9 of the least, and a choice that holds no more; (inf, ()) where every choice
        is forbidden.

    Raises:
        SolverError: where HiGHS fails.
    """
    began = time.monotonic()
    free = _without_costs(problem)
    times: tuple[int, ...] = ()
    best, bound = math.inf, 0.0
    best_choice: tuple[int, ...] = ()
    while True:
        reduction = reduce_problem(free, times)
        if reduction.problem is None:
            return math.inf, ()
        inner: tuple[int, ...] = tuple(int(node.costs.argmin()) for node in reduction.problem.nodes)
        if any(node.costs.size > 1 for node in reduction.problem.nodes):
            left = None if time_limit_s is None else time_limit_s - (time.monotonic() - began)
            if left is not None and left <= 0 and best_choice:
                return best, best_choice
            program = least_peak_program(reduction.problem)
            answer = run_highs(program, time_limit_s=left, start=None, seed=seed, gap=0.0)
            if answer.status == "failed":
                raise SolverError(f"HiGHS stopped with {answer.said!r} on {program.costs.size} columns")
            if answer.status == "infeasible":
                return math.inf, ()
            if answer.values is None:
                return best, best_choice
            inner = program.choice(answer.values)
            bound = max(bound, answer.bound / program.scale)
        else:
            bound = max(bound, peak_bytes(reduction.problem, inner))
        choice = reduction.lift(inner)
        peak = peak_bytes(problem, choice)
        if peak < best or not best_choice:
            best, best_choice = peak, choice
        if best <= bound * (1 + _PEAK_TOLERANCE):
            return best, best_choice
        new = set(broken_times(problem, choice, bound * (1 + _PEAK_TOLERANCE))) - set(times)
        if not new:
            return best, best_choice
        times = tuple(sorted({*times, *new}))


def _without_costs(problem: ChoiceProblem) -> ChoiceProblem:
    """The same choices and usages, all for nothing, under no limit (inf, so that rows count)."""

    def nothing(costs: Array) -> Array:
        return np.where(np.isinf(costs), math.inf, 0.0)

    nodes = tuple(replace(node, costs=nothing(node.costs)) for node in problem.nodes)
    edges = tuple(replace(edge, costs=nothing(edge.costs)) for edge in problem.edges)
    return replace(problem, nodes=nodes, edges=edges, limit_bytes=math.inf)
