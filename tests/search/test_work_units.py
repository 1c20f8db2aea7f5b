"""Work units: the same on one core and two, with plans kept or not; and no problem takes more than it did.

`pytest tests/search/test_work_units.py --write-work` keeps the counts of today in ``work_units.json``. A commit that
raises one says why.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import ParallelFunction, Plan
from autopar.search.cache import PlanCache
from autopar.search.job import Solving
from autopar.search.mesh_search import MeshSearch
from autopar.search.policy import SearchPolicy
from benchmarks.drawn import draw, plan_of
from benchmarks.fixed_plans import CASES, Case, toy
from examples import mlp
from tests.versions import tolerance

FILE = Path(__file__).with_name("work_units.json")
KEPT: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))
#: Cases that are planned by default, one of each kind of search; the others are slow.
QUICK = ("one stage, mlp", "one stage, limit", "one stage, tiny, recomputed where short", "pipeline, mlp")
#: Numbers of drawn problems, of seed 41, that take up to fifteen CPU seconds.
DRAWN = (1, 2, 3, 4, 5, 7, 8, 10, 14, 15)

planner = sys.modules["autopar.search.planner"]
parallel = sys.modules["autopar.search.worker_pool"]
problem_data = sys.modules["autopar.search.problem_data"]


def _of_fixed(case: Case) -> Callable[[], Plan]:
    return case.plan


def _of_drawn(number: int) -> Callable[[], Plan]:
    return lambda: plan_of(draw(41, number))


PLANS: dict[str, Callable[[], Plan]] = {
    **{case.name: _of_fixed(case) for case in CASES if case.name != "pipeline, limit"},  # which has no plan
    **{f"drawn {n}": _of_drawn(n) for n in DRAWN},
}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANS]


@pytest.mark.parametrize("name", NAMES)
def test_no_problem_takes_more_units_than_it_did(name: str, request: pytest.FixtureRequest) -> None:
    units = PLANS[name]().search.work
    if request.config.getoption("--write-work"):
        kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        known = {**kept, name: units}
        FILE.write_text(json.dumps({n: known[n] for n in PLANS if n in known}, indent=1) + "\n", encoding="utf-8")
        return
    assert units <= KEPT[name] * (1 + tolerance(0.1, 0.0)), f"{name}: {units:,} units, {KEPT[name]:,} before"


def test_the_table_is_of_these_problems() -> None:
    assert list(KEPT) == list(PLANS)


def _small(**options: Any) -> Plan:
    step, args = mlp.build("tiny", abstract=True, layers=4)
    plan: Plan = autopar.parallelize(step, cluster=toy(), donate_argnums=0, **options).plan(*args)
    return plan


def _pipeline(in_second: bool) -> Plan:
    step, args = mlp.build("tiny", abstract=True, layers=4)
    policy = SearchPolicy(in_second_process=in_second)
    like = autopar.parallelize(step, cluster=toy(), donate_argnums=0, num_stages=2, num_microbatches=4)
    plan: Plan = ParallelFunction(step, dataclasses.replace(like.options, policy=policy)).plan(*args)
    return plan


def test_one_core_and_two_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    call = parallel.Process.call

    def counted(self: Any, *args: Any) -> Any:
        calls.append(args)
        return call(self, *args)

    monkeypatch.setattr(parallel.Process, "call", counted)
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    two = _pipeline(True)
    assert calls
    assert _pipeline(False).search.work_by_kind == two.search.work_by_kind


def test_plans_that_were_kept_count_as_if_they_were_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cold = _small()
    monkeypatch.setattr("autopar.api.pure.plan_cache", lambda _: PlanCache(tmp_path, least_s=0.0))
    first = _small()
    assert list(tmp_path.iterdir())
    again = _small()
    assert "cache" in dict(again.phases)
    assert cold.search.work_by_kind == first.search.work_by_kind == again.search.work_by_kind


def test_a_file_keeps_the_units() -> None:
    plan = _small(num_stages=1)
    loaded = Plan.from_json(plan.to_json())
    assert loaded.search.work_by_kind == plan.search.work_by_kind
    assert loaded.search.work == sum(units for _, units in plan.search.work_by_kind) > 0


def test_a_mesh_that_is_solved_twice_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "one stage, limit"
    solve = MeshSearch.solved

    def twice(*args: Any, **known: Any) -> Any:
        solve(*args, **known)
        return solve(*args, **known)

    monkeypatch.setattr(MeshSearch, "solved", twice)
    assert PLANS[name]().search.work > KEPT[name]


@pytest.mark.slow
def test_a_key_that_is_never_found_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage is tried with ample memory first, and then again with what that has built."""
    name, numbers = "four nodes, limit", itertools.count()
    asked = problem_data._on_any_mesh

    def another(problem: Any) -> Any:
        known = asked(problem)
        return dataclasses.replace(known, solving=Solving(seed=next(numbers)))

    monkeypatch.setattr(problem_data, "_on_any_mesh", another)
    assert PLANS[name]().search.work > KEPT[name]
