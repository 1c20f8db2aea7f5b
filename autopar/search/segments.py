"""Whether loops over layers may run in segments, asked where memory is short."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search.problem import Problem
from autopar.search.source import StepSource


@dataclass(frozen=True)
class Segments:
    """What a step says of it, if it is asked.

    Args:
        problem: what was asked for.
        step: the step.
        named: whether a strategy names the plan, and what it recomputes.
    """

    problem: Problem
    step: StepSource
    named: bool

    def __call__(self) -> tuple[int, ...]:
        """Numbers of layers a segment, the best first; empty where loops are to run as they are."""
        o = self.problem.options
        if self.named or o.offload != "none" or o.remat not in ("auto", "full"):
            return ()
        return self.step.segments()
