"""`StepProblem`: a step to be planned in whatever form, and the strategy that shards it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.microbatch import even_counts
from autopar.search.cache import PlanCache
from autopar.search.problem import Problem
from autopar.search.registry import Strategy
from autopar.search.source import StepSource


@dataclass(frozen=True)
class StepProblem:
    """A step to be planned in whatever form.

    Args:
        problem: the step in one microbatch, where it runs, and what is asked for; what is None is free.
        step: the step in other forms.
        counts: numbers of microbatches that may be taken, the first is wanted; None where all may.
        strategy: shards one stage, or cuts the step into stages itself.
        cache: plans that are kept; None keeps none.
    """

    problem: Problem
    step: StepSource
    counts: Sequence[int] | None
    strategy: Strategy
    cache: PlanCache | None = None

    @property
    def possible_counts(self) -> Sequence[int]:
        """Numbers of microbatches that may be taken, powers of two where all may."""
        return self.counts or even_counts(self.problem.graph)
