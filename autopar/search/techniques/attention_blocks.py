"""Whether attention may run in blocks, and of how many scores."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Graph
from autopar.ir.blockwise import find
from autopar.plan import Plan
from autopar.plan.content import blocks_note
from autopar.search.problem import Problem
from autopar.search.techniques.base import Asked


def block_scores(problem: Problem) -> int:
    """Scores of one head from which attention runs in blocks, where some of the step does; else 0."""
    if problem.request.attention == "plain":
        return 0
    least = 1 if problem.request.attention == "blocks" else problem.policy.attention.least_scores
    return least if _has_cores(problem.graph, least) else 0


@dataclass(frozen=True)
class Blocks:
    """Attention in blocks; a value is the number of scores of one head from which on."""

    field: str = "block_scores"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if asked.problem.request.attention == "plain":
            return "attention='plain' takes it as it is written"
        return "" if block_scores(asked.problem) else "no attention has as many scores"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """See `PlannedTechnique`."""
        scores = block_scores(asked.problem)
        return (scores,) if scores else ()

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return blocks_note(value)


BLOCKS = Blocks()


def stage_block_scores(problem: Problem, one_stage: Plan | None) -> int:
    """Scores of one head from which attention of the stages of a pipeline runs in blocks; 0 where it does not.

    Where both forms may be taken it is that of one stage, or blocks where one stage has no plan: a pipeline is planned
    once. Slices of tokens take attention as it is written.

    Args:
        problem: the whole step.
        one_stage: its plan of one stage; None before there is one, or where none fits.
    """
    if problem.request.token_slices is not None:
        return 0
    plain = problem.request.attention == "auto" and one_stage is not None and not one_stage.stages[0].form.block_scores
    return 0 if plain else block_scores(problem)


def _has_cores(graph: Graph, least: int) -> bool:
    bodies = (region for op in graph.operators for _, region in op.regions)
    return bool(find(graph, least)) or any(_has_cores(body, least) for body in bodies)
