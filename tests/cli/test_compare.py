"""``autopar compare`` and `autopar.compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.search.compare import Budget, compare_problem
from autopar.search.problem_data import save_problem
from examples import mlp
from tests.cli.conftest import Run
from tests.search.problems import problem_of, toy

TARGET = "train.py:train_step"
CLUSTER = ("--cluster", "dgx-a100")


@pytest.mark.usefixtures("folder")
def test_json_has_ranking_and_curves(run: Run) -> None:
    result = run("compare", TARGET, *CLUSTER, "--search", "random,alpa,replicated", "--steps", "200", "--seed", "1",
                 "--seed", "2", "--mesh", "8", "--format", "json", "-q")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert (found["program"], found["steps"], found["seeds"]) == ("train_step", 200, [1, 2])
    assert found["ranking"][0]["ratio"] == 1
    ratios = [row["ratio"] for row in found["ranking"]]
    assert ratios == sorted(ratios)
    assert [(t["strategy"], t["seed"]) for t in found["trials"]] == [
        ("random", 1), ("random", 2), ("alpa", 1), ("replicated", 1)
    ]  # fmt: skip
    for t in found["trials"]:
        costs = [float(f"{cost:.12g}") for _, cost in t["curve"]]  # sums of steps are rounded
        assert costs == sorted(costs, reverse=True) and t["failure"] == ""
        assert 0 < t["step_time_s"] <= costs[-1] * (1 + 1e-9)
        assert [s for s, _ in t["curve"]] == sorted(s for s, _ in t["curve"])


@pytest.mark.usefixtures("folder")
def test_text_is_a_table_of_all(run: Run) -> None:
    result = run("compare", TARGET, *CLUSTER, "--search", "zero1,exhaustive", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "zero1" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["1", "exhaustive"], ["2", "zero1"]]
    assert result.stdout.splitlines()[0].startswith("train_step on dgx-a100")


@pytest.mark.usefixtures("folder")
def test_an_unknown_name_is_wrong_usage(run: Run) -> None:
    result = run("compare", TARGET, *CLUSTER, "--search", "alpa,mcms")
    assert result.exit_code == 2
    assert "mcms" in result.stderr and "mcmc" in result.stderr


def test_a_function_and_its_problem_are_ranked_alike() -> None:
    fn, args = mlp.build(abstract=True, layers=1)
    names = ("random", "alpa", "data-parallel")
    found = autopar.compare(fn, *args, search=names, steps=100, cluster=toy(4), mesh_shape=(4,), num_stages=1)
    of_problem = autopar.compare(problem_of(fn, args, toy(4), mesh_shape=(4,)), search=names, steps=100)
    assert found.rows()[0][:4] == of_problem.rows()[0][:4]
    assert [s.step_times for s in found.ranking()] == [s.step_times for s in of_problem.ranking()]
    assert found.best.search.strategy == found.ranking()[0].strategy == "alpa"
    assert str(found).count("\n") == 2 + len(names)


def test_those_without_a_plan_come_last_with_the_reason() -> None:
    fn, args = mlp.build(abstract=True, layers=2)
    problem = problem_of(fn, args, toy(4), mesh_shape=(4,))
    found = compare_problem(problem, ("exhaustive", "replicated"), Budget(steps=1))
    first, last = found.ranking()
    assert (first.strategy, first.place, last.strategy, last.place) == ("replicated", 1, "exhaustive", None)
    assert "takes 1 choices" in last.note
    with pytest.raises(AutoparError, match="no strategy found a plan"):
        _ = compare_problem(problem, ("exhaustive",), Budget(steps=1)).best


def test_equally_fast_ones_share_a_place() -> None:
    fn, args = mlp.build(abstract=True, layers=1)
    problem = problem_of(fn, args, toy(4), mesh_shape=(4,))
    found = compare_problem(problem, ("data-parallel", "manual", "replicated"), Budget())
    places = {s.strategy: s.place for s in found.ranking()}
    assert places["data-parallel"] == places["manual"] != places["replicated"]
    assert sorted(p for p in places.values() if p is not None) in ([1, 1, 3], [1, 2, 2])


def test_strategies_that_cut_stages_get_the_source() -> None:
    fn, args = mlp.build(abstract=True)
    found = autopar.compare(fn, *args, search=("gpipe", "zero1"), cluster=toy(8, bandwidth=1e11))
    plans = {t.strategy: t.plan for t in found.trials}
    assert plans["gpipe"] is not None and plans["gpipe"].num_stages > 1
    assert plans["zero1"] is not None and plans["zero1"].num_stages == 1


def test_a_saved_problem(run: Run, tmp_path: Path) -> None:
    fn, args = mlp.build(abstract=True, layers=1)
    path = str(tmp_path / "problem.json.gz")
    save_problem(problem_of(fn, args, toy(4), mesh_shape=(4,)), path)
    result = run("compare", path, "--search", "replicated,alpa", "--format", "json", "-q")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["strategy"] for row in found["ranking"]] == ["alpa", "replicated"]
    wrong = run("compare", path, "--cluster", "dgx-a100")
    assert (wrong.exit_code, "--cluster is for functions" in wrong.stderr) == (2, True)
    assert run("compare", path, "--search", "mine").exit_code == 1
