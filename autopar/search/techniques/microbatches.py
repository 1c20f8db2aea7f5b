"""In how many microbatches a step may run."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Graph
from autopar.microbatch import batch_size
from autopar.search.techniques.base import Asked


@dataclass(frozen=True)
class Microbatches:
    """Microbatches; a value is their number. Those of a stage are the schedule's: one number, which is given."""

    field: str = "microbatches"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if asked.problem.job.num_microbatches == 1:
            return "num_microbatches=1"
        return "" if self.options(asked) else "there is no batch of several examples"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """See `PlannedTechnique`. One is among them where none is asked for."""
        count = asked.problem.job.num_microbatches
        if count is not None:
            return () if count == 1 else (count,)
        size = batch_size(asked.problem.graph) or 1
        return () if size == 1 else tuple(2**k for k in range(size.bit_length()))

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return ()


MICROBATCHES = Microbatches()
