"""Looks within the memory limit say which mesh is solved first, and leave others out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from autopar.cluster import Cluster, LogicalMesh
from autopar.search import mesh_search
from autopar.search.alpa import alpa
from autopar.search.intra import ShardingProblem
from autopar.search.mesh_bounds import LimitRelaxations, all_relaxed, relaxations_within_limit
from autopar.search.mesh_search import MeshSearch
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem, Solution, Status, is_feasible
from examples import mlp
from tests.search.problems import problem_of, problem_with, toy


def _short(limit: int = 18_000) -> Problem:
    """A step that breaks its limit on both meshes where it is not told of it."""
    fn, args = mlp.build(abstract=True, layers=2, hidden=64, batch=16)
    return problem_of(fn, args, toy(8), memory_limit_bytes=limit)


@pytest.fixture(autouse=True)
def relaxes_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems get looks too."""
    for name in ("TINY", "FEW_NODES"):
        monkeypatch.setattr(import_module("autopar.solver.solve"), name, 0)


def _relaxed(cost: float, bound: float) -> Solution:
    return Solution(Status.FEASIBLE, (0,), cost, bound, 0.0, "relaxation")


def test_no_mesh_is_relaxed_where_memory_is_ample() -> None:
    problem = _short(10**9)
    relaxed_meshes = all_relaxed(MeshSearch(problem))
    assert relaxations_within_limit(MeshSearch(problem), relaxed_meshes, float("inf"), lambda *_: None) == {}


def test_meshes_that_nothing_fits_are_not_relaxed() -> None:
    problem = _short(12_000)
    relaxed_meshes = all_relaxed(MeshSearch(problem))
    assert relaxations_within_limit(MeshSearch(problem), relaxed_meshes, float("inf"), lambda *_: None) == {}


def test_the_mesh_of_the_cheapest_relaxation_is_solved_first_and_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, offers = _short(), list[float]()
    solved, plain = list[LogicalMesh](), MeshSearch.unlimited

    def counted(self: MeshSearch, sharding_problem: ShardingProblem, *known: Any) -> Solution:
        solved.append(sharding_problem.mesh)
        return plain(self, sharding_problem, *known)

    def offer(_: ShardingProblem, relaxed: Solution | None) -> None:
        offers.append(float("inf") if relaxed is None else relaxed.objective)

    monkeypatch.setattr(MeshSearch, "unlimited", counted)
    relaxed_meshes = all_relaxed(MeshSearch(problem))
    relaxations = relaxations_within_limit(MeshSearch(problem), relaxed_meshes, float("inf"), offer)
    assert len(relaxations) == 2 and not any(relaxed.fits for relaxed in relaxed_meshes)
    assert min(offers) == min(relaxed.cost_s for relaxed in relaxations.values())
    cheapest = min(relaxations, key=lambda i: relaxations[i].cost_s)
    dearest = max(relaxations, key=lambda i: relaxations[i].bound_s)
    assert relaxations[dearest].bound_s > relaxations[cheapest].cost_s
    plan = alpa(problem)
    # Its bound without a limit is below that plan, that of the look within it is not.
    assert relaxed_meshes[dearest].bound_s < plan.search.objective
    assert solved == [relaxed_meshes[cheapest].sharding_problem.mesh]
    assert any("left out" in c.name for c in plan.search.considered)


def test_a_mesh_is_useless_by_the_bounds_of_both_forms() -> None:
    assert LimitRelaxations(_relaxed(3.0, 2.0)).is_useless(1.9, float("inf"))
    assert LimitRelaxations(_relaxed(3.0, 2.0)).is_useless(float("inf"), 1.9)
    assert not LimitRelaxations(_relaxed(3.0, 2.0)).is_useless(2.0, float("inf"))
    assert not LimitRelaxations(None).is_useless(0.0, 0.0)
    split = _short_split()
    assert not LimitRelaxations(_relaxed(3.0, 2.0), split, None).is_useless(1.0, 1.0)
    # What is joined makes the second form cheaper than it is priced.
    assert not LimitRelaxations(_relaxed(3.0, 2.0), split, _relaxed(3.0, 2.0), 1.1).is_useless(1.9, float("inf"))
    assert LimitRelaxations(_relaxed(3.0, 2.0), split, _relaxed(3.0, 2.0), 1.01).is_useless(1.9, float("inf"))


def _short_split() -> ShardingProblem:
    problem = _short()
    return all_relaxed(MeshSearch(problem))[0].sharding_problem


@pytest.mark.parametrize("binds", (False, True))
def test_an_answer_that_the_limit_bound_is_improved_within_it(binds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, plain = list[float | None](), mesh_search.solve_relaxed

    def relaxed(choices: ChoiceProblem, *more: Any) -> Solution | None:
        limits.append(choices.limit_bytes)
        return plain(choices, *more)

    monkeypatch.setattr(mesh_search, "solve_relaxed", relaxed)
    monkeypatch.setattr(mesh_search, "LARGE", 0)
    meshes = MeshSearch(_short())
    choices = meshes.program(meshes.meshes[0]).problem
    improved = meshes.improved(choices, (), binds=binds)
    assert is_feasible(choices, improved.choice)
    assert set(limits) == ({choices.limit_bytes} if binds else {None, choices.limit_bytes})


@pytest.mark.parametrize("share", (0.9, 1.0))
def test_plans_are_improved_within_the_limit_where_it_bound(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    said, plain = list[bool](), MeshSearch.improved

    def improved(self: MeshSearch, *some: Any, binds: bool = False) -> Solution:
        said.append(binds)
        return plain(self, *some, binds=binds)

    monkeypatch.setattr(MeshSearch, "improved", improved)
    fn, args = mlp.build(abstract=True, layers=2, hidden=4096, batch=1024)
    problem = problem_of(fn, args, Cluster.load("dgx-a100", nodes=1))
    roomy = alpa(problem)
    assert not isinstance(roomy, Bounded) and not said[0]
    said.clear()
    plan = alpa(problem_with(problem, memory_limit_bytes=int(share * roomy.peak_memory)))
    assert not isinstance(plan, Bounded)
    assert said[0] is plan.content.memory_bound is (share < 1)
