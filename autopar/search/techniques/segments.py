"""Whether loops over layers may run in segments, asked where memory is short."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Graph
from autopar.ir.layer_loops import segment_lengths
from autopar.search.techniques.base import Asked, body_of


@dataclass(frozen=True)
class Segments:
    """Segments of layers; a value is a number of layers.

    With host memory, what enters segments may lie there too: the backward pass of one stage fetches it
    one segment ahead, that of a stage of a pipeline one microbatch ahead.
    """

    field: str = "segment_layers"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if (reason := _ruled_out(asked)) or segment_lengths(body_of(asked.problem.graph)):
            return reason
        return "no pair of loops over layers keeps less in segments"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """See `PlannedTechnique`."""
        return () if _ruled_out(asked) else segment_lengths(body_of(asked.problem.graph))

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return ()


def _ruled_out(asked: Asked) -> str:
    job = asked.problem.job
    if asked.named:
        return "a strategy names what is recomputed"
    if job.offload not in ("none", "auto"):
        return f"offload={job.offload!r} moves whole layers"
    # Of stages the name of a level may be a strategy's.
    if job.remat not in (("auto",) if asked.is_stage else ("auto", "full")):
        return f"remat={job.remat!r} names what is recomputed"
    return ""


SEGMENTS = Segments()
