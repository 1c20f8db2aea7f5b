"""A statement of a sharding problem is the same whatever was stated before on other meshes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar import Cluster
from autopar.search.intra import build
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.intra.walk import GraphWalk
from autopar.search.problem import Problem
from examples import gpt, mlp, moe, wide_resnet
from tests.search.problems import problem_of

STEPS = {
    "perceptron": lambda: mlp.build("tiny", abstract=True),
    "unrolled": lambda: gpt.build("tiny", abstract=True),
    "loop": lambda: gpt.build("tiny", abstract=True, scan=True, remat=True),
    "experts": lambda: moe.build("tiny", abstract=True),
    "convolutions": lambda: wide_resnet.build("tiny", abstract=True),
}


def on(cluster: str, step: str) -> Problem:
    fn, args = STEPS[step]()
    return problem_of(fn, args, Cluster.load(cluster).part(0, 8))


def numbers(stated: ShardingProblem) -> list[Any]:
    """All of a statement that plans depend on."""
    nodes = [(n.name, n.costs.tolist()) for n in stated.problem.nodes]
    edges = [(e.source, e.target, np.asarray(e.costs).tolist()) for e in stated.problem.edges]
    usages = [(u.node, u.start, u.stop, np.asarray(u.bytes).tolist()) for u in stated.problem.usages]
    values = [(k, v.node, v.fused, v.transient, v.basis, sorted(v.stored)) for k, v in stated.values.items()]
    return [nodes, edges, usages, values, [(s.id, s.work, s.weight) for s in stated.sites]]


@pytest.mark.few(2)
@pytest.mark.parametrize("cluster", ["dgx-a100", "tpu-v5e"])
@pytest.mark.parametrize("step", STEPS)
def test_kernels_are_found_once_and_are_those_of_any_mesh(
    cluster: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    kernel = GraphWalk._kernel

    def counted(self: GraphWalk, graph: Any, op: Any, *rest: Any) -> Any:
        calls.append(op.id)
        return kernel(self, graph, op, *rest)

    monkeypatch.setattr(GraphWalk, "_kernel", counted)
    problem, fresh = on(cluster, step), on(cluster, step)
    first, *_, last = problem.cluster.logical_meshes()
    build(problem, first)
    once = len(calls)
    stated = build(problem, last)
    assert len(calls) == once > 0
    assert numbers(stated) == numbers(build(fresh, last))
    assert numbers(stated) != numbers(build(fresh, first))
