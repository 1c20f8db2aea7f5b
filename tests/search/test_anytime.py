"""A search that a time limit or Ctrl-C ends gives the best plan until then, and keeps nothing of what it left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner

import autopar
from autopar import Plan
from autopar.api.pure import PureFunction
from autopar.cli import main
from autopar.cluster import Cluster
from autopar.search import Problem
from autopar.search.alpa import alpa
from autopar.search.anytime import Incumbent, SearchEndedError
from examples import mlp
from tests.search.problems import toy

NOTE = "the search was ended by"


def planned(cluster: Cluster, **options):
    fn, args = mlp.build(abstract=True, layers=2, hidden=64, batch=16)
    return autopar.parallelize(fn, cluster=cluster, **options).plan(*args)


def test_without_time_the_first_plan_is_the_answer():
    hasty, whole = planned(toy(4), time_limit_s=0), planned(toy(4))
    assert any(NOTE in note and "time limit" in note for note in hasty.notes)
    assert hasty.search.lower_bound <= whole.step_time <= hasty.step_time
    assert not any(NOTE in note for note in whole.notes)


@pytest.mark.slow
def test_time_to_spare_changes_nothing():
    assert planned(toy(4), time_limit_s=3600).to_json() == planned(toy(4)).to_json()


def test_what_was_cut_short_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    hasty = planned(toy(4), time_limit_s=0)
    later = planned(toy(4))
    assert any(NOTE in note for note in hasty.notes) and not any(NOTE in note for note in later.notes)


def test_ctrl_c_gives_the_best_plan_that_is_known():
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if sum("into stages" in line for line in lines) and lines[0] != line:
            raise KeyboardInterrupt

    plan = planned(toy(4, bandwidth=1e7), progress=interrupt)
    assert any(NOTE in note and "Ctrl-C" in note for note in plan.notes)
    assert plan.num_stages == 1, "one stage was planned before pipelines were tried"
    assert "best so far" in lines[-1] and "best so far" not in lines[0]


def test_ctrl_c_before_any_plan_is_an_interrupt():
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(toy(4), progress=interrupt)


def test_the_end_comes_only_with_a_plan():
    plan = planned(toy(4))
    incumbent = Incumbent(-math.inf)
    incumbent.checkpoint()
    assert incumbent.cut_short("its time limit") is None
    incumbent.offer(plan)
    with pytest.raises(SearchEndedError):
        incumbent.checkpoint()


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_limit_is_a_number_of_seconds(limit):
    with pytest.raises(autopar.AutoparError, match="time_limit_s"):
        planned(toy(4), time_limit_s=limit)


def test_the_command_has_it_too():
    asked = ["plan", "examples.mlp", "--cluster", "dgx-a100", "--format", "json", "-q", "--time-limit", "0"]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == 0, found.output
    assert NOTE in found.stdout and json.loads(found.stdout)


def test_an_incumbent_that_is_faster_than_what_is_solved_is_the_answer(monkeypatch):
    """What is solved to the end is said by sums of seconds: a look that hides more may have been left out."""
    plan = planned(toy(4))

    def slower(problem: Problem) -> Plan:
        solved = alpa(problem)
        problem.offer(solved)
        content = msgspec.structs.replace(solved.content, step_time=2 * solved.step_time)
        return replace(solved, content=content)

    monkeypatch.setattr(PureFunction, "_strategy", lambda self: slower)
    assert planned(toy(4)).step_time == plan.step_time
    incumbent = Incumbent()
    incumbent.offer(plan)
    thousandth = replace(plan, content=msgspec.structs.replace(plan.content, step_time=plan.step_time / 0.999))
    assert incumbent.fastest(thousandth, 0.005) is thousandth, "a gain of a thousandth is left"
