"""`StepProblem`: a step to be planned in whatever form, and the strategy that shards it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.analysis import gradient_bytes, state_bytes
from autopar.microbatch import even_counts
from autopar.search.cache import PlanCache
from autopar.search.outcome import TooLarge
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

    def state_too_large(self, *, with_gradients: bool) -> TooLarge | None:
        """Why nothing fits: all devices together cannot hold what lies there once, whatever the form of the step.

        These are the parameters and the state of the optimizer. What hosts may hold is no proof.

        Args:
            with_gradients: whether all gradients lie there too, as where passes and update are programs of their own.
        """
        problem = self.problem
        if problem.job.offload != "none":
            return None
        held = problem.graph.fact(state_bytes) + (problem.graph.fact(gradient_bytes) if with_gradients else 0)
        parts = "parameters, optimizer state and gradients" if with_gradients else "parameters and optimizer state"
        missing = math.ceil(held / problem.cluster.num_devices) - problem.memory_limit_bytes
        return TooLarge(f"{parts}, shared by all devices", missing) if missing > 0 else None
