"""Whether attention may run in blocks, and of how many scores."""

from __future__ import annotations

from autopar.ir import Graph
from autopar.ir.blockwise import find
from autopar.search.problem import Problem


def block_scores(problem: Problem) -> int:
    """Scores of one head from which attention runs in blocks, where some of the step does; else 0."""
    if problem.options.attention == "plain":
        return 0
    least = 1 if problem.options.attention == "blocks" else problem.policy.attention.least_scores
    return least if _has_cores(problem.graph, least) else 0


def _has_cores(graph: Graph, least: int) -> bool:
    bodies = (region for op in graph.operators for _, region in op.regions)
    return bool(find(graph, least)) or any(_has_cores(body, least) for body in bodies)
