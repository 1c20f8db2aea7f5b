"""Choices drawn at random (Bergstra and Bengio, JMLR 13, 2012): what every search should beat."""

from __future__ import annotations

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method


def random(problem: Problem) -> Plan:
    """The best of choices drawn at random (Bergstra and Bengio, JMLR 2012).

    Where none of them is allowed (memory, or pairs that exclude each other) the answer is the choice that every method
    begins from.

    Args:
        problem: what is planned; `Solving.steps` and ``seed`` decide the answer, ``time_limit_s`` is a cap.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "random", draw)


def draw(run: MethodRun, draws: int = 64) -> None:
    """Spends the steps of ``run``, of which so many ``draws`` are evaluated at a time."""
    block = min(draws, run.steps)
    while run.more(block):
        choices = run.rng.integers(run.space.sizes, size=(block, run.space.sizes.size))
        scores = run.space.scores(choices)
        best = int(scores.argmin())
        run.offer(choices[best], float(scores[best]))
