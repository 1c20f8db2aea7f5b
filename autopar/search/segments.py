"""Whether loops over layers may run in segments, asked where memory is short."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Graph
from autopar.ir.phases import is_stage_loop
from autopar.ir.segment_loops import segment_lengths
from autopar.search.problem import Problem


@dataclass(frozen=True)
class Segments:
    """Facts about segments of a step, computed on demand.

    Where state may lie in host memory, so may what enters segments: the backward pass fetches it one segment ahead.

    Args:
        problem: what was asked for.
        named: whether a strategy names the plan, and what it recomputes.
    """

    problem: Problem
    named: bool

    def __call__(self) -> tuple[int, ...]:
        """Numbers of layers a segment, the best first; empty where loops are to run as they are."""
        job = self.problem.job
        if self.named or job.offload not in ("none", "auto") or job.remat not in ("auto", "full"):
            return ()
        return segment_lengths(self.problem.graph)


def stage_segments(problem: Problem, graph: Graph) -> tuple[int, ...]:
    """Numbers of layers a segment for one stage of a pipeline, the best first.

    Args:
        problem: what was asked for. Recomputation that it names rules segments out: the name may be a strategy's.
        graph: of the stage.
    """
    job = problem.job
    if job.offload != "none" or job.remat != "auto":
        return ()
    return next((segment_lengths(op.region("body")) for op in graph.operators if is_stage_loop(op)), ())
