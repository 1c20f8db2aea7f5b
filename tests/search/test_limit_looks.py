"""Looks within the memory limit say which mesh is solved first, and leave others out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from autopar.cluster import LogicalMesh
from autopar.search.alpa import alpa
from autopar.search.intra import ShardingProblem
from autopar.search.mesh_bounds import LimitLooks, all_looked_at, looks_within_limit
from autopar.search.mesh_search import MeshSearch
from autopar.search.problem import Problem
from autopar.solver import Solution, Status
from examples import mlp
from tests.search.problems import problem_of, toy


def _short(limit: int = 18_000) -> Problem:
    """A step that breaks its limit on both meshes where it is not told of it."""
    fn, args = mlp.build(abstract=True, layers=2, hidden=64, batch=16)
    return problem_of(fn, args, toy(8), memory_limit_bytes=limit)


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems get looks too."""
    for name in ("TINY", "FEW_NODES"):
        monkeypatch.setattr(import_module("autopar.solver.solve"), name, 0)


def _look(cost: float, bound: float) -> Solution:
    return Solution(Status.FEASIBLE, (0,), cost, bound, 0.0, "look")


def test_no_mesh_is_looked_at_where_memory_is_ample() -> None:
    problem = _short(10**9)
    looked = all_looked_at(MeshSearch(problem))
    assert looks_within_limit(MeshSearch(problem), looked, float("inf"), lambda *_: None) == {}


def test_meshes_that_nothing_fits_are_not_looked_at() -> None:
    problem = _short(12_000)
    looked = all_looked_at(MeshSearch(problem))
    assert looks_within_limit(MeshSearch(problem), looked, float("inf"), lambda *_: None) == {}


def test_the_mesh_of_the_cheapest_look_is_solved_first_and_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, offers = _short(), list[float]()
    solved, plain = list[LogicalMesh](), MeshSearch.unlimited

    def counted(self: MeshSearch, sharding_problem: ShardingProblem, *known: Any) -> Solution:
        solved.append(sharding_problem.mesh)
        return plain(self, sharding_problem, *known)

    def offer(_: ShardingProblem, look: Solution | None) -> None:
        offers.append(float("inf") if look is None else look.objective)

    monkeypatch.setattr(MeshSearch, "unlimited", counted)
    looked = all_looked_at(MeshSearch(problem))
    looks = looks_within_limit(MeshSearch(problem), looked, float("inf"), offer)
    assert len(looks) == 2 and not any(look.fits for look in looked)
    assert min(offers) == min(look.cost_s for look in looks.values())
    cheapest = min(looks, key=lambda i: looks[i].cost_s)
    dearest = max(looks, key=lambda i: looks[i].bound_s)
    assert looks[dearest].bound_s > looks[cheapest].cost_s
    plan = alpa(problem)
    # Its bound without a limit is below that plan, that of the look within it is not.
    assert looked[dearest].bound_s < plan.search.objective
    assert solved == [looked[cheapest].sharding_problem.mesh]
    assert any("left out" in c.name for c in plan.search.considered)


def test_a_mesh_is_useless_by_the_bounds_of_both_forms() -> None:
    assert LimitLooks(_look(3.0, 2.0)).is_useless(1.9, float("inf"))
    assert LimitLooks(_look(3.0, 2.0)).is_useless(float("inf"), 1.9)
    assert not LimitLooks(_look(3.0, 2.0)).is_useless(2.0, float("inf"))
    assert not LimitLooks(None).is_useless(0.0, 0.0)
    split = _short_split()
    assert not LimitLooks(_look(3.0, 2.0), split, None).is_useless(1.0, 1.0)
    # What is joined makes the second form cheaper than it is priced.
    assert not LimitLooks(_look(3.0, 2.0), split, _look(3.0, 2.0), 1.1).is_useless(1.9, float("inf"))
    assert LimitLooks(_look(3.0, 2.0), split, _look(3.0, 2.0), 1.01).is_useless(1.9, float("inf"))


def _short_split() -> ShardingProblem:
    problem = _short()
    return all_looked_at(MeshSearch(problem))[0].sharding_problem
