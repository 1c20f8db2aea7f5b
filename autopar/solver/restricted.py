"""The problem of some strategies only, solved exactly where elimination's tables stay small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver.elimination import MOST_ENTRIES, plan_elimination
from autopar.solver.evaluate import objective
from autopar.solver.presolve import Reduction, reduce_problem
from autopar.solver.problem import Array, ChoiceProblem


def restricted(problem: ChoiceProblem, keep: Sequence[NDArray[np.bool_]]) -> Reduction:
    """The reduced problem in which each node has the strategies marked in ``keep`` only."""
    nodes = tuple(
        node if marks.all() else replace(node, costs=np.where(marks, node.costs, math.inf))
        for node, marks in zip(problem.nodes, keep, strict=True)
    )
    return reduce_problem(replace(problem, nodes=nodes))


def eliminated(reduction: Reduction, most_entries: int = MOST_ENTRIES) -> tuple[int, ...] | None:
    """The cheapest choice of a reduced problem without usages; None where tables would be too large.

    It is () where there is nothing to choose.
    """
    problem = reduction.problem
    if problem is None or problem.usages:
        return None
    elimination = plan_elimination(problem, most_entries)
    if elimination is None:
        return None
    return elimination.least([node.costs for node in problem.nodes])[1]


def cheapest_within(
    problem: ChoiceProblem, keep: Sequence[NDArray[np.bool_]], most_entries: int = MOST_ENTRIES
) -> tuple[float, tuple[int, ...]] | None:
    """The least cost over the strategies marked in ``keep``, and its choice (inf and () where all is forbidden).

    Returns None where tables would be too large, or memory is limited.
    """
    reduction = restricted(problem, keep)
    if reduction.problem is None:
        return math.inf, ()
    inner = eliminated(reduction, most_entries)
    if inner is None:
        return None
    choice = reduction.lift(inner)
    return objective(problem, choice), choice


def lowest(excess: Sequence[Array], count: int) -> list[NDArray[np.bool_]]:
    """Marks the best strategy of each node and the ``count`` others of least ``excess``."""
    every = np.sort(np.concatenate(list(excess)))
    width = float(every[min(len(excess) + count, every.size) - 1])
    return [over <= max(width, float(over.min())) for over in excess]
