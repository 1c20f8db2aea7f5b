"""The contest's file format: what is read, and that what is written comes back."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import (
    ChoiceProblem,
    Edge,
    Node,
    ProblemError,
    Status,
    Usage,
    decode_contest,
    objective,
    read_contest,
    solve,
)
from tests.solver.contest_files import encode_contest, write_contest
from tests.solver.problems import plain_cost, plain_peak, random_problem

SMALL = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [5, 5]],
            "costs": [[3, 5], [7, 2, 10**18], [1]],
            "usages": [[4, 1], [3, 3, 0], [9]],
        },
        "edges": {"nodes": [[0, 1], [2, 0]], "costs": [[0, 1, 2, 10**19, 4, 5], [6, 0]]},
        "usage_limit": 6,
    }
}


def document(**changes: object) -> bytes:
    return json.dumps({"problem": {**SMALL["problem"], **changes}}).encode()


def test_what_is_read() -> None:
    problem = decode_contest(document())
    assert [node.name for node in problem.nodes] == ["0", "1", "2"]
    assert problem.nodes[1].costs.tolist() == [7, 2, math.inf]
    assert problem.edges[0].costs.tolist() == [[0, 1, 2], [math.inf, 4, 5]]
    assert (problem.edges[1].source, problem.edges[1].target, problem.limit_bytes) == (2, 0, 6)
    # Half-open, so an empty interval holds nothing.
    assert [(u.node, u.start, u.stop, u.bytes.tolist()) for u in problem.usages] == [
        (0, 0, 2, [4, 1]),
        (1, 1, 3, [3, 3, 0]),
    ]
    answer = solve(problem)
    assert (answer.status, answer.choice, answer.objective) == (Status.OPTIMAL, (1, 1, 0), 12)


def test_an_edge_from_a_node_to_itself_is_a_cost_of_the_node() -> None:
    problem = decode_contest(document(edges={"nodes": [[0, 0]], "costs": [[10, 1, 2, 20]]}))
    assert problem.edges == ()
    assert problem.nodes[0].costs.tolist() == [13, 25]


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    problem = random_problem(5)
    write_contest(problem, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(b"\x1f\x8b") == name.endswith(".gz")
    write_contest(read_contest(tmp_path / name), tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_round_trip_keeps_cost_and_memory_of_every_choice(seed: int, other: int) -> None:
    problem = random_problem(seed)
    again = decode_contest(encode_contest(problem))
    size = len(problem.nodes)
    r = np.random.default_rng(other)
    choice = tuple(int(r.integers(node.costs.size)) for node in problem.nodes)
    # What is behind the nodes of the problem holds the further usages of one node, and follows it.
    whole = list(choice) + [0] * (len(again.nodes) - size)
    for edge in again.edges:
        if edge.target >= size:
            whole[edge.target] = whole[edge.source]
    assert plain_cost(again, tuple(whole)) == pytest.approx(plain_cost(problem, choice), rel=1e-12)
    assert plain_peak(again, tuple(whole)) == plain_peak(problem, choice)
    if problem.limit_bytes is None:
        assert again.limit_bytes >= plain_peak(problem, choice)
    else:
        assert again.limit_bytes == problem.limit_bytes
    assert encode_contest(again) == encode_contest(problem)


def test_round_trip_keeps_the_optimum() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        wanted, found = solve(problem), solve(decode_contest(encode_contest(problem)))
        assert found.status is wanted.status
        if wanted.choice:
            assert found.objective == pytest.approx(wanted.objective, rel=1e-12, abs=1e-15)
            assert objective(problem, found.choice[: len(problem.nodes)]) == pytest.approx(found.objective, rel=1e-12)


def test_whole_numbers_of_a_unit() -> None:
    problem = ChoiceProblem((Node("a", [1.2e-6, math.inf]),), (), (Usage(0, 0, 1, [3.0, 4.0]),), 10.0)
    written = json.loads(encode_contest(problem, name="x", cost_unit=1e-9))["problem"]
    assert (written["name"], written["nodes"]["costs"], written["usage_limit"]) == ("x", [[1200, 10**18]], 10)
    with pytest.raises(ProblemError, match="cost_unit"):
        encode_contest(problem, cost_unit=1e-25)


def test_equal_tables_share_their_memory() -> None:
    nodes = tuple(Node(f"n{i}", [0.0, 1.0]) for i in range(3))
    edges = tuple(Edge(i, i + 1, [[0.0, 1.0], [2.0, 0.0]]) for i in range(2))
    again = decode_contest(encode_contest(ChoiceProblem(nodes, edges)))
    assert again.edges[0].costs is again.edges[1].costs


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"not json",
        document(nodes={"intervals": [], "costs": [[1]], "usages": [[1]]}),
        document(nodes={"intervals": [[0, 1]], "costs": [["a"]], "usages": [[1]]}),
        document(edges={"nodes": [[0, 7]], "costs": [[1]]}),
        document(edges={"nodes": [[0, 1]], "costs": [[1]]}),
        document(edges={"nodes": [[0, 1]], "costs": []}),
    ],
)
def test_what_is_no_problem(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ProblemError):
        decode_contest(data)
    (tmp_path / "p.gz").write_bytes(gzip.compress(data)[:-4])
    with pytest.raises(ProblemError):
        read_contest(tmp_path / "p.gz")
