"""Malformed problems are named as such."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solver import ChoiceProblem, Edge, Node, ProblemError, Solution, Status, Usage, objective


@pytest.mark.parametrize("costs", [[], [[1.0]], [math.nan, 1.0], [-math.inf, 1.0]])
def test_bad_node_costs(costs: list[float]) -> None:
    with pytest.raises(ProblemError, match="'a'"):
        Node("a", np.array(costs))


def test_bad_edges_and_usages() -> None:
    nodes = (Node("a", np.zeros(2)), Node("b", np.zeros(3)))
    with pytest.raises(ProblemError, match="itself"):
        Edge(1, 1, np.zeros((3, 3)))
    with pytest.raises(ProblemError, match="need"):
        ChoiceProblem(nodes, (Edge(0, 1, np.zeros((3, 2))),))
    with pytest.raises(ProblemError, match="leaves"):
        ChoiceProblem(nodes, (Edge(0, 2, np.zeros((2, 3))),))
    with pytest.raises(ProblemError, match="before its start"):
        Usage(0, 3, 2, np.zeros(2))
    with pytest.raises(ProblemError, match="negative"):
        Usage(0, 0, 2, np.array([1.0, -1.0]))
    with pytest.raises(ProblemError, match="3 entries for 2"):
        ChoiceProblem(nodes, (), (Usage(0, 0, 2, np.zeros(3)),))
    with pytest.raises(ProblemError, match="two nodes"):
        ChoiceProblem((nodes[0], nodes[0]), ())
    with pytest.raises(ProblemError, match="nan"):
        ChoiceProblem(nodes, (), (), math.nan)


def test_objective_of_parallel_edges() -> None:
    edges = (Edge(0, 1, np.array([[1.0, 2.0]])), Edge(1, 0, np.array([[10.0], [20.0]])))
    problem = ChoiceProblem((Node("a", np.array([100.0])), Node("b", np.array([0.0, math.inf]))), edges)
    assert objective(problem, (0, 0)) == 111.0
    assert objective(problem, (0, 1)) == math.inf


def test_gap() -> None:
    assert Solution(Status.FEASIBLE, (0,), 10.0, 9.0, 0.0, "x").gap == pytest.approx(0.1)
    assert Solution(Status.UNKNOWN, (), math.inf, 9.0, 0.0, "x").gap == math.inf
    assert Solution(Status.OPTIMAL, (0,), 10.0, 9.999999, 0.0, "x").gap == 0.0
