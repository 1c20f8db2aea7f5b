"""What a form holds in any case is said before it is stated, and a form that does not fit is not stated."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from autopar.api.steps import TracedStep
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.plan import StepForm
from autopar.search import Problem
from autopar.search.alpa import alpa
from autopar.search.intra import build
from autopar.search.intra.floor import held_bytes, held_elsewhere, most_shards
from autopar.search.pipeline.whole_steps import counts_that_may_fit
from autopar.search.store import Store
from autopar.solver.memory import memory_floor
from examples import gpt, mlp
from tests.search.problems import f32, problem_of, problem_with, toy
from tests.search.programs import random_graph

mesh_search = import_module("autopar.search.mesh_search")


def _floors(problem: Problem) -> list[tuple[float, float]]:
    """What is said before a statement, and by it, on each mesh."""
    meshes = problem.cluster.logical_meshes()
    return [(held_bytes(problem, mesh), memory_floor(build(problem, mesh).problem)) for mesh in meshes]


@pytest.mark.parametrize("donates", [False, True])
def test_no_more_is_said_than_the_statement_says(donates: bool) -> None:
    cluster, said = toy(8), 0
    for seed in range(20):
        graph = random_graph(np.random.default_rng(seed))
        donated = frozenset(i.name for i in graph.inputs) if donates else frozenset[str]()
        problem = problem_with(Problem(graph, cluster, CostModel(cluster)), donated=donated)
        for before, stated in _floors(problem):
            assert before <= stated, seed
            said += before > stated / 2
    assert said > 20


@pytest.mark.parametrize("donates", [False, True])
def test_a_statement_says_no_more_of_another_mesh_than_its_own_does(donates: bool) -> None:
    cluster, said, every = toy(8), 0, 0
    for seed in range(15):
        graph = random_graph(np.random.default_rng(seed))
        donated = frozenset(i.name for i in graph.inputs) if donates else frozenset[str]()
        problem = problem_with(Problem(graph, cluster, CostModel(cluster)), donated=donated)
        known = {mesh: build(problem, mesh) for mesh in cluster.logical_meshes()}
        for here, there in itertools.permutations(known, 2):
            stated = memory_floor(known[there].problem)
            elsewhere = held_elsewhere(problem, known[here], there)
            assert elsewhere <= stated, seed
            said, every = said + (elsewhere > 0.8 * stated), every + 1
    assert said > every / 2


def test_of_a_train_step_most_is_said() -> None:
    for module, sizes in ((mlp, {"layers": 2, "batch": 512}), (gpt, {"layers": 1, "batch": 64, "scan": True})):
        step, args = module.build("tiny", abstract=True, **sizes)
        assert all(0.4 * stated < before <= stated for before, stated in _floors(problem_of(step, args, toy(8))))


def test_a_form_that_holds_too_much_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.build(abstract=True, layers=2, hidden=64, batch=16)
    problem = problem_of(step, args, toy(8), memory_limit_bytes=1000, explains_infeasible=False)
    stated: list[Any] = []
    monkeypatch.setattr(mesh_search, "build", lambda *a, **k: (stated.append(a), build(*a, **k))[1])
    with pytest.raises(InfeasiblePlanError, match="it needs more") as caught:
        alpa(problem)
    assert not stated
    assert caught.value.least_bytes is not None
    assert 1000 < caught.value.least_bytes <= min(stated for _, stated in _floors(problem))


def test_what_one_mesh_cannot_hold_is_not_stated_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.build(abstract=True, layers=2, hidden=64, batch=16)
    problem = problem_of(step, args, toy(8))
    limit = 1 + int(min(before for before, _ in _floors(problem)))
    short = problem_with(problem, memory_limit_bytes=limit, explains_infeasible=False)
    stated: list[Any] = []
    monkeypatch.setattr(mesh_search, "build", lambda *a, **k: (stated.append(a), build(*a, **k))[1])
    with pytest.raises(InfeasiblePlanError, match="it needs more"):
        alpa(short)
    assert len(stated) == 1 < len(problem.cluster.logical_meshes())


def test_the_first_number_of_microbatches_that_may_fit_is_that_of_the_statements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of numbers that hold too much by the graph of one microbatch nothing is stated."""
    fn, args = mlp.build(abstract=True, layers=8, hidden=32, batch=4096)
    signature, _ = flatten_call(fn, args, {}, SignatureOptions())
    step, problem, counts = TracedStep(trace(fn, signature), (), (), 4), problem_of(fn, args, toy(4)), [2, 4, 8, 16]
    meshes = problem.cluster.logical_meshes()
    graphs = {count: step.in_form(StepForm(count)).graph for count in counts}
    floors = {
        count: min(memory_floor(build(replace(problem, graph=graph), mesh).problem) for mesh in meshes)
        for count, graph in graphs.items()
    }
    for count in counts:
        assert min(held_bytes(problem, mesh, count) for mesh in meshes) <= floors[count]
    assert sorted(floors.values(), reverse=True) == list(floors.values())
    stated: list[int] = []

    def noted(problem: Problem, *more: Any, **options: Any) -> Any:
        stated.append(next(count for count, graph in graphs.items() if graph is problem.graph))
        return build(problem, *more, **options)

    monkeypatch.setattr(mesh_search, "build", noted)
    for first in (4, 16):
        stated.clear()
        short = problem_with(problem, memory_limit_bytes=math.ceil(floors[first]))
        assert counts_that_may_fit(replace(short, store=Store()), step, counts) == counts[counts.index(first) :]
    assert stated.count(2) == 1, "its statement on one mesh says that it does not fit the other"
    stated.clear()
    tiny = problem_with(problem, memory_limit_bytes=1000)
    assert counts_that_may_fit(replace(tiny, store=Store()), step, counts) == counts
    assert not stated


def test_each_axis_splits_one_dim_that_it_divides() -> None:
    def shards(*shape: int) -> int:
        (type,) = (i.type for i in problem_of(lambda x: x + 1.0, (f32(*shape),), toy(8)).graph.inputs)
        return most_shards(type, (2, 4))

    assert [shards(8), shards(4), shards(2, 4), shards(6, 3), shards(3), shards()] == [8, 4, 8, 2, 1, 1]
