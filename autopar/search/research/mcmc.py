"""Metropolis-Hastings over per-operator choices (Jia, Zaharia, Aiken: FlexFlow, MLSys'19, section 6)."""

from __future__ import annotations

import math

import numpy as np

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method
from autopar.search.research.space import Walk


def mcmc(problem: Problem) -> Plan:
    """Metropolis-Hastings over per-operator choices (FlexFlow, Jia et al., MLSys'19).

    A step draws a node and one of its other strategies, prices the change by that node's own tables (FlexFlow's delta
    simulation) and takes it with probability min(1, exp(-beta * change)); beta rises from 1% to 0.001% of the cost
    of the start. The walk goes back to the best choice after a tenth of the steps without a better one.

    Args:
        problem: what is planned; `Solving.steps` and ``seed`` decide the answer, ``time_limit_s`` is a cap.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "mcmc", walk)


def walk(run: MethodRun, hot: float = 1e-2, cold: float = 1e-5, patience: float = 0.1) -> None:
    """Spends the steps of ``run``.

    Args:
        run: the run.
        hot: rise of the cost, as a share of it, that is accepted with probability 1/e at first.
        cold: likewise at the end.
        patience: share of the steps without a better choice after which the walk returns to the best.
    """
    space = run.space
    free = np.flatnonzero(space.sizes > 1)
    here = Walk(space, run.start)
    run.offer(here.choice, here.score)
    if not free.size:
        return
    first = max(here.score, 1e-300)
    since = 0
    while run.more():
        node = int(free[int(run.rng.integers(free.size))])
        strategy = int(run.rng.integers(space.sizes[node] - 1))
        strategy += strategy >= here.choice[node]  # one of the others
        delta = float(here.deltas(node)[strategy])
        heat = first * hot * (cold / hot) ** (run.spent / run.steps)
        taken = delta <= 0 or float(run.rng.random()) < math.exp(-min(delta / heat, 700.0))
        if taken and here.fits(node, strategy):
            here.move(node, strategy, delta)
        since += 1
        if here.score < run.cost * (1 - 1e-12):
            run.offer(here.choice, here.score)
            since = 0
        elif since > patience * run.steps:
            here, since = Walk(space, run.best), 0
