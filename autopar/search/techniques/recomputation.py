"""Levels of recomputation that may be taken."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Graph
from autopar.recompute import LEVELS, Level
from autopar.search.techniques.base import Asked


@dataclass(frozen=True)
class Recomputation:
    """Recomputation in the backward pass; a value is the level of what is held."""

    field: str = "remat"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        return "" if self.options(asked) else "remat='none' holds all that the backward pass reads"

    def options(self, asked: Asked) -> tuple[Level, ...]:
        """See `PlannedTechnique`. That which holds the most comes first."""
        levels = levels_of(asked.problem.job.remat)
        return () if levels == ("none",) else levels

    def notes(self, graph: Graph, value: Level) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return ()


RECOMPUTATION = Recomputation()


def levels_of(remat: str) -> tuple[Level, ...]:
    """Levels of a job's ``remat``, that which holds the most first."""
    return LEVELS if remat == "auto" else tuple(level for level in LEVELS if level == remat)
