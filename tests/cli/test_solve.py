"""``autopar solve``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from autopar.solver import ChoiceProblem, Node, Solution, Usage, is_feasible, solve
from tests.cli.conftest import Run
from tests.solver.contest_files import write_contest
from tests.solver.problems import grid, with_usages


def test_cost_bound_gap_and_choice(run: Run, tmp_path: Path) -> None:
    problem = with_usages(grid(2, 6, 4), 1, 0.4)
    path, output = tmp_path / "p.json.gz", tmp_path / "solution.json"
    write_contest(problem, path)
    done = run("solve", str(path), "--time-limit", "3", "--seed", "3", "-o", str(output), "--format", "json")
    assert done.exit_code == 0, done.stderr
    shown, written = json.loads(done.stdout), json.loads(output.read_text())
    solution = written.pop("solution")
    assert is_feasible(problem, solution)
    assert shown == written
    assert shown["status"] in ("optimal", "feasible")
    assert shown["bound"] <= shown["cost"]
    assert shown["gap"] >= 0
    assert "read" in shown["seconds"]
    text = run("solve", str(path), "-q", "--solver", "highs").stdout
    for word in ("cost", "bound", "gap", "status", "read"):
        assert word in text


def test_a_small_problem_is_answered_within_no_time(run: Run, tmp_path: Path) -> None:
    problem, output = with_usages(grid(2, 6, 4), 1, 0.4), tmp_path / "solution.json"
    write_contest(problem, tmp_path / "p.json")
    done = run("solve", str(tmp_path / "p.json"), "--time-limit", "0", "-o", str(output))
    assert done.exit_code == 0, done.stderr
    assert is_feasible(problem, json.loads(output.read_text())["solution"])


def test_nothing_feasible_is_exit_code_1(run: Run, tmp_path: Path) -> None:
    problem = ChoiceProblem((Node("a", [1.0]),), (), (Usage(0, 0, 1, [5.0]),), 4.0)
    write_contest(problem, tmp_path / "p.json")
    done = run("solve", str(tmp_path / "p.json"))
    assert done.exit_code == 1
    assert "infeasible" in done.stdout
    assert "no choice was found" in done.stderr


def test_mistakes(run: Run, tmp_path: Path) -> None:
    assert run("solve", str(tmp_path / "absent.json")).exit_code == 2
    (tmp_path / "p.json").write_text("{}")
    done = run("solve", str(tmp_path / "p.json"))
    assert done.exit_code == 1
    assert "contest's format" in done.stderr


def test_the_limit_is_that_of_the_whole_command(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 seconds the start took 100, which says that the end takes half as much; one in a hundred is kept."""
    command = importlib.import_module("autopar.cli.solve")
    limits: list[float | None] = []

    def noted(problem: ChoiceProblem, solver: object, *, time_limit_s: float | None, seed: int) -> Solution:
        limits.append(time_limit_s)
        return solve(problem)

    monkeypatch.setattr(command, "_age_s", lambda: 100.0)
    monkeypatch.setattr(command, "solve", noted)
    write_contest(grid(2, 3, 2), tmp_path / "p.json")
    assert run("solve", str(tmp_path / "p.json"), "--time-limit", "1000").exit_code == 0
    assert run("solve", str(tmp_path / "p.json")).exit_code == 0
    assert limits[0] is not None and 800.0 < limits[0] <= 1000.0 * 0.99 - 100.0 * 1.5
    assert limits[1] is None
