"""`CuttableStep`: a step from which stages are cut, with the strategy that plans each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.plan import Plan
from autopar.search.outcome import Bounded
from autopar.search.parallel import SERIAL, WorkerPool
from autopar.search.problem import Problem
from autopar.search.source import StageSource


@dataclass(frozen=True)
class CuttableStep:
    """A step from which stages are cut.

    Args:
        problem: of the whole step.
        source: cuts it.
        intra: plans one stage on its submesh.
        pool: plans some of them in another process.
    """

    problem: Problem
    source: StageSource
    intra: Callable[[Problem], Plan | Bounded]
    pool: WorkerPool = SERIAL
