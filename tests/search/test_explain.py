"""`Plan.explain` and the choices that it reads: their costs are those of the problem."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar import parallelize
from autopar.errors import PlanMismatchError
from autopar.search.intra import build
from autopar.search.intra.records import reasons_of
from autopar.solver import objective, solve
from examples import mlp
from tests.search.problems import problem_of, toy


def solved(mesh_shape=(2, 2)):
    fn, args = mlp.build(abstract=True, layers=2)
    cluster = toy(4)
    problem = problem_of(fn, args, cluster)
    (mesh,) = cluster.logical_meshes(mesh_shape)
    sharding_problem = build(problem, mesh)
    free = replace(sharding_problem.problem, limit_bytes=None)
    return problem, sharding_problem, free, solve(free).choice


@pytest.mark.slow
def test_costs_are_those_of_changing_one_node():
    _, sharding_problem, free, choice = solved()
    best = objective(free, choice)
    reasons = {c.name: c for c in reasons_of(sharding_problem, choice)}
    checked = 0
    for n, node in enumerate(sharding_problem.nodes):
        if node.name.startswith("copy of "):
            assert node.name not in reasons
            continue
        reason = reasons[node.name]
        assert reason.choice == node.label(choice[n])
        others = {}
        for k in range(len(node.costs)):
            if k != choice[n]:
                others[k] = objective(free, (*choice[:n], k, *choice[n + 1 :]))
        finite = {k: cost for k, cost in others.items() if np.isfinite(cost)}
        if not finite:
            assert reason.runner_up == ""
            assert reason.runner_up_cost is None
            continue
        least = min(finite.values())
        assert reason.runner_up in {node.label(k) for k, cost in finite.items() if cost <= least * (1 + 1e-9)}
        assert reason.runner_up_cost - reason.cost == pytest.approx(least - best, rel=1e-6, abs=1e-15)
        assert reason.runner_up_cost >= reason.cost - 1e-15  # the choice is the optimum
        checked += 1
    assert checked > 20


def test_costs_add_up_to_the_objective():
    _, sharding_problem, free, choice = solved()
    own = sum(n.costs[k] for n, k in zip(sharding_problem.nodes, choice, strict=True))
    edges = sum(e.costs[choice[e.source], choice[e.target]] for e in free.edges)
    assert own + edges == pytest.approx(objective(free, choice), rel=1e-12)


@pytest.fixture(scope="module")
def plan():
    fn, args = mlp.build(abstract=True, layers=2)
    return parallelize(fn, cluster=toy(4), mesh_shape=(4,)).plan(*args)


def test_text_of_an_argument_and_of_an_operator(plan):
    path = next(i.path for i in plan.content.inputs if i.role == "batch")
    layout = next(i.layout for i in plan.content.inputs if i.path == path)
    text = plan.explain(path)
    assert text.startswith(path)
    assert f"choice:     {layout}" in text
    assert "runner-up:  " in text
    assert "(everything else as it is)" in text
    product = next(r.id for r in plan.content.operators if "dot_general" in r.id)
    text = plan.explain(product)
    assert product in text
    assert "->" in text


def test_every_operator_and_argument_has_an_explanation(plan):
    for name in (*(i.path for i in plan.content.inputs), *(r.id for r in plan.content.operators)):
        if "scan" not in name:
            assert name in plan.explain(name)


def test_without_a_name_the_dearest_choices(plan):
    text = plan.explain()
    dearest = max(plan.content.choices, key=lambda c: c.cost)
    assert dearest.name in text
    assert text.count("choice:") == 10


def test_an_unknown_name_lists_near_ones(plan):
    product = next(r.id for r in plan.content.operators if "dot_general" in r.id)
    with pytest.raises(PlanMismatchError, match="no operator or argument") as caught:
        plan.explain(product.replace("general", "genral"))
    assert product in str(caught.value)
