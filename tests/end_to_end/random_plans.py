"""A search that draws a plan at random among all that the problem allows: it reaches every rule and every path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.plan import Plan, SearchContent
from autopar.search import Problem
from autopar.search.assemble import assemble
from autopar.search.clock import Clock
from autopar.search.intra import build, extract
from autopar.solver import ChoiceProblem


def random_choice(problem: ChoiceProblem, rng: np.random.Generator, tries: int = 50) -> list[int]:
    """A strategy for every node, with no infinite cost; nodes are drawn in random order."""
    neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.nodes]
    for e in problem.edges:
        finite = np.isfinite(e.costs)
        if not finite.all():
            neighbours[e.source].append((e.target, finite))
            neighbours[e.target].append((e.source, finite.T))
    for _ in range(tries):
        allowed = [np.isfinite(n.costs) for n in problem.nodes]
        choice = [-1] * len(allowed)
        for node in rng.permutation(len(allowed)):
            options = [
                k
                for k in np.flatnonzero(allowed[node])
                if all((allowed[other] & ok[k]).any() for other, ok in neighbours[node])
            ]
            if not options:
                break
            choice[node] = int(rng.choice(options))
            allowed[node] = np.arange(len(allowed[node])) == choice[node]
            for other, ok in neighbours[node]:
                allowed[other] = allowed[other] & ok[choice[node]]
        else:
            return choice
    raise AssertionError("no choice found")


def random_plan(seed: int) -> Callable[[Problem], Plan]:
    """The search that draws with ``seed``, on one of the meshes that the options allow."""

    def search(problem: Problem) -> Plan:
        rng = np.random.default_rng(seed)
        meshes = problem.cluster.logical_meshes(problem.job.mesh_shape)
        mesh = meshes[int(rng.integers(len(meshes)))]
        stated = build(problem, mesh, split_phases=bool(rng.integers(2)))
        choice = random_choice(stated.problem, rng)
        sharding = extract(problem, stated, choice)
        return assemble(problem, stated, choice, sharding, SearchContent("random", 0.0, None), Clock())

    return search
