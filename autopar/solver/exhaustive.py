"""`ExhaustiveSolver`: tries every combination. The oracle that the other solvers are tested against."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.base import SolverError
from autopar.solver.evaluate import FIT_TOLERANCE, maximal_times, objective
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.solution import Solution, Status

_BLOCK = 1 << 16  # combinations evaluated in one go


@dataclass(frozen=True)
class ExhaustiveSolver:
    """Evaluates all combinations, block by block; of equal costs the first in lexicographic order wins.

    Args:
        max_combinations: refuse problems with more of them.
        prune: skip blocks whose first strategies cost more than the best so far even if all the rest were at
            its least. Off by default: the oracle should have nothing in it that may be wrong.
    """

    max_combinations: int = 4_000_000
    prune: bool = False
    name = "exhaustive"
    presolves = False

    def solve(
        self,
        problem: ChoiceProblem,
        *,
        time_limit_s: float | None = None,
        start: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Solution:
        """The best choice, by trying all; ``start`` and ``seed`` change nothing.

        Raises `SolverError` on too large problems.
        """
        if problem.combinations > self.max_combinations:
            raise SolverError(
                f"solver 'exhaustive' takes {self.max_combinations:,} combinations of strategies, the problem has "
                f"{problem.combinations:,}",
                remedy="use solver 'highs'",
            )
        began = time.monotonic()
        sizes = [node.costs.size for node in problem.nodes]
        head = _head_length(sizes)
        best: tuple[int, ...] = ()
        best_cost, complete = math.inf, True
        least = sum(float(n.costs.min()) for n in problem.nodes) + sum(float(e.costs.min()) for e in problem.edges)
        for prefix in itertools.product(*(range(n) for n in sizes[:head])):
            if time_limit_s is not None and time.monotonic() - began > time_limit_s:
                complete = False
                break
            if self.prune and _prefix_cost(problem, prefix) > best_cost:
                continue
            costs = np.where(_block_fits(problem, prefix), _block_costs(problem, prefix), math.inf)
            at = int(costs.argmin())
            if costs.flat[at] < best_cost:
                best = prefix + tuple(int(k) for k in np.unravel_index(at, costs.shape))
                best_cost = float(costs.flat[at])
        feasible = math.isfinite(best_cost)
        cost = objective(problem, best) if feasible else math.inf
        if complete:
            status = Status.OPTIMAL if feasible else Status.INFEASIBLE
        else:
            status = Status.FEASIBLE if feasible else Status.UNKNOWN
        bound = cost if complete else min(least, cost)
        return Solution(status, best, cost, bound, time.monotonic() - began, self.name)


def _head_length(sizes: list[int]) -> int:
    """Number of leading nodes to loop over, so that the combinations of the rest fit into one block."""
    rest = 1
    for at in range(len(sizes), 0, -1):
        rest *= sizes[at - 1]
        if rest > _BLOCK or len(sizes) - at >= 32:
            return at
    return 0


def _spread(values: Array, axes: list[int], rank: int) -> Array:
    """``values`` with its dims (in the order of ``axes``) laid on those axes of an array of ``rank`` dims."""
    ordered = values.transpose(np.argsort(axes)) if len(axes) > 1 else values
    shape = [1] * rank
    for axis, size in zip(sorted(axes), ordered.shape, strict=True):
        shape[axis] = size
    return ordered.reshape(shape)


def _block_costs(problem: ChoiceProblem, prefix: tuple[int, ...]) -> Array:
    """Costs of all choices that begin with ``prefix``, one axis for each further node."""
    head = len(prefix)
    rank = len(problem.nodes) - head
    total: Array = np.zeros([node.costs.size for node in problem.nodes[head:]])
    for v, node in enumerate(problem.nodes):
        total += node.costs[prefix[v]] if v < head else _spread(node.costs, [v - head], rank)
    for edge in problem.edges:
        values, axes = edge.costs, [edge.source - head, edge.target - head]
        if axes[1] < 0:
            values, axes = values[:, prefix[edge.target]], axes[:1]
        if axes[0] < 0:
            values, axes = values[prefix[edge.source]], axes[1:]
        total += _spread(values, axes, rank) if axes else values
    return total


def _block_fits(problem: ChoiceProblem, prefix: tuple[int, ...]) -> NDArray[np.bool_]:
    """Choices that begin with ``prefix`` and obey the memory limit."""
    head = len(prefix)
    rank = len(problem.nodes) - head
    shape = [node.costs.size for node in problem.nodes[head:]]
    good = np.ones(shape, dtype=np.bool_)
    if problem.limit_bytes is None:
        return good
    limit = problem.limit_bytes + abs(problem.limit_bytes) * FIT_TOLERANCE
    good &= limit >= 0
    for at in maximal_times(problem.usages):
        used: Array = np.zeros(shape)
        for u in problem.usages:
            if u.start <= at < u.stop:
                used += u.bytes[prefix[u.node]] if u.node < head else _spread(u.bytes, [u.node - head], rank)
        good &= used <= limit
    return good


def _prefix_cost(problem: ChoiceProblem, prefix: tuple[int, ...]) -> float:
    """A bound on the cost of every choice that begins with ``prefix``: each term at its least."""
    head = len(prefix)
    total = 0.0
    for v, node in enumerate(problem.nodes):
        total += float(node.costs[prefix[v]] if v < head else node.costs.min())
    for edge in problem.edges:
        rows = edge.costs if edge.source >= head else edge.costs[prefix[edge.source]][None]
        total += float((rows if edge.target >= head else rows[:, prefix[edge.target]]).min())
    return total
