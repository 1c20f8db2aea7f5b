"""A biased random-key genetic algorithm (Goncalves and Resende, 2011), as REGAL (ICLR'20) uses it for placement."""

from __future__ import annotations

import numpy as np

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method


def evolutionary(problem: Problem) -> Plan:
    """Biased random-key genetic algorithm (Goncalves and Resende, J. Heuristics 2011; REGAL, ICLR'20).

    An individual has a strategy for each node. In every generation the elite stays, new mutants are drawn, and each
    other child takes every gene from an elite parent with probability 0.7, else from a parent of the rest. The first
    generation has the choice that every method begins from.

    Args:
        problem: what is planned; `Solving.steps` and ``seed`` decide the answer, ``time_limit_s`` is a cap.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "evolutionary", evolve)


def evolve(
    run: MethodRun, population: int = 100, elite_share: float = 0.15, mutant_share: float = 0.1, elite_bias: float = 0.7
) -> None:
    """Spends the steps of ``run``, with the numbers of Goncalves and Resende.

    Args:
        run: the run.
        population: individuals.
        elite_share: share of them that stays.
        mutant_share: share of them that is drawn in each generation.
        elite_bias: probability that a gene comes from the elite parent.
    """
    space, rng = run.space, run.rng
    nodes = space.sizes.size
    count = max(4, min(population, run.steps // 4))
    elite, mutants = max(1, int(elite_share * count)), max(1, int(mutant_share * count))
    people = rng.integers(space.sizes, size=(count, nodes))
    people[0] = run.start
    while run.more(count):
        scores = space.scores(people)
        order = np.argsort(scores, kind="stable")
        run.offer(people[order[0]], float(scores[order[0]]))
        best, rest = people[order[:elite]], people[order[elite:]]
        children = count - elite - mutants
        mothers = best[rng.integers(len(best), size=children)]
        fathers = rest[rng.integers(len(rest), size=children)]
        born = np.where(rng.random((children, nodes)) < elite_bias, mothers, fathers)
        people = np.concatenate([best, born, rng.integers(space.sizes, size=(mutants, nodes))])
