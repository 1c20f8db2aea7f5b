"""The benchmark of the contest: what it evaluates, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.solver import solve
from benchmarks import contest
from tests.solver.contest_files import encode_contest, write_contest
from tests.solver.problems import grid, with_usages


@pytest.mark.slow
def test_contest_evaluates_what_it_is_told(tmp_path: Path) -> None:
    problem = with_usages(grid(2, 4, 3), 1, 0.5)
    whole = replace(
        problem,
        nodes=tuple(replace(n, costs=np.rint(n.costs * 1e6)) for n in problem.nodes),
        edges=tuple(replace(e, costs=np.rint(e.costs * 1e6)) for e in problem.edges),
        limit_bytes=float(int(problem.limit_bytes or 0)),
    )
    write_contest(whole, tmp_path / "some-X.json.gz")
    best = solve(whole)
    data = json.loads(encode_contest(whole))["problem"]
    assert contest.evaluate(data, best.choice) == best.objective
    assert contest.evaluate(data, best.choice[:-1]) is None
    assert contest.evaluate({**data, "usage_limit": 0}, best.choice) is None
    (tmp_path / "contest_results.csv").write_text(f"team,X\na,{2 * int(best.objective)}\nb,{int(best.objective)}\n")
    report = contest.run(True, print, tmp_path, "X")
    (row,) = report.rows
    assert row["cost"] == best.objective and row["bound"] <= best.objective
    assert (row["best/cost"], row["winner's best/cost"]) == ("1.00000", "0.50000")
    assert contest.run(True, print).rows == ()
