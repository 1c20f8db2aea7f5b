"""The trail of a search: every number of stages is accounted for, and what it says of alternatives is right."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from msgspec.structs import replace as replace_row

import autopar
from autopar import Plan
from autopar.cli import main
from autopar.errors import InfeasiblePlanError, MicrobatchError, PlanMismatchError
from autopar.plan.alternatives import TOPICS, outcome_text
from autopar.plan.trail import BOUNDED, LEFT_OUT, PLANNED, TOO_LARGE, TrailRow, ranges_of, ranges_text
from autopar.report.page import plan_page
from autopar.search import Manual
from autopar.search.outcome import Bounded, Impossible, LeftOut, Planned, TooLarge
from autopar.search.trail import MOST_ROWS, Region, Trail, outcome_of
from benchmarks.fixed_plans import perceptron, toy


@pytest.fixture(scope="module")
def free() -> Plan:
    """A perceptron on two nodes of two devices, with everything free."""
    step, args = perceptron(64, 64, 32, 64, 64)
    plan: Plan = autopar.parallelize(step, cluster=toy(2, 2), donate_argnums=0).plan(*args)
    return plan


def _numbers(text: str) -> list[int]:
    """Numbers before the colons of lines."""
    found = []
    for line in text.splitlines()[2:]:
        for part in line.partition(":")[0].split(","):
            if match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part):
                found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def test_every_number_of_stages_up_to_the_devices_is_told_once(free: Plan) -> None:
    assert sorted(_numbers(free.explain("stages"))) == [1, 2, 3, 4]
    assert free.explain("stages").startswith(f"stages: {free.num_stages} chosen")


@pytest.mark.parametrize("topic", TOPICS)
def test_outcomes_keep_to_the_width_of_the_text(free: Plan, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    wide = free.explain(topic)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = free.explain(topic)
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == wide.split()


def test_meshes_of_a_pipeline_name_their_stages(free: Plan) -> None:
    step, args = perceptron(64, 64, 32, 64, 64)
    plan = autopar.parallelize(step, cluster=toy(2, 2), num_stages=2, num_microbatches=2, donate_argnums=0).plan(*args)
    text = plan.explain("mesh")
    assert sorted(map(int, re.findall(r"^stages? ([\d, ]+), mesh", text, re.M)[0].split(", "))) in ([0, 1], [0])
    assert "stage" not in free.explain("mesh") or free.num_stages > 1
    assert sum(row.work for row in free.search.trail) <= free.search.work


@pytest.mark.slow
def test_competitors_asked_for_by_name_take_no_less_than_told_and_longer_than_the_plan(free: Plan) -> None:
    step, args = perceptron(64, 64, 32, 64, 64)
    rows = [row for row in free.search.trail if row.form == "pipeline" and row.least_s]
    assert len(rows) >= 2
    for row in rows:
        for stages, _ in row.stages:
            asked = autopar.parallelize(step, cluster=toy(2, 2), donate_argnums=0, num_stages=stages).plan(*args)
            assert asked.step_time >= 0.85 * row.least_s, "estimates err by as much; other rows say a bound"
            assert asked.step_time >= free.step_time


def test_a_planned_alternative_is_the_plan_asked_for_by_name() -> None:
    step, args = perceptron(64, 64, batch=64)
    plan = autopar.parallelize(step, cluster=toy(), donate_argnums=0, memory_limit=31_000, num_stages=1).plan(*args)
    others = [
        r for r in plan.search.trail if r.outcome == PLANNED and r.remat != plan.stages[0].form.remat and not r.how
    ]
    other = min(others, key=lambda row: row.seconds)
    asked = autopar.parallelize(
        step,
        cluster=toy(),
        donate_argnums=0,
        memory_limit=31_000,
        num_stages=1,
        num_microbatches=other.microbatches[0],
        remat=other.remat,
    ).plan(*args)
    assert asked.step_time == pytest.approx(other.seconds, rel=0.01)


def test_merged_rows_say_that_their_seconds_are_those_of_the_fastest() -> None:
    row = TrailRow("pipeline", PLANNED, ((2, 2),), (4,), seconds=2.0)
    assert outcome_text(row, 1.0) == "planned: 2 s (+100.0%)"
    for several in (replace_row(row, stages=((2, 3),)), replace_row(row, microbatches=(4, 8))):
        assert outcome_text(several, 1.0) == "planned: 2 s the fastest (+100.0%)"


def test_memory_that_is_short_says_by_how_much_and_where() -> None:
    step, args = perceptron(64, 64, 64, batch=256)
    plan = autopar.parallelize(
        step, cluster=toy(4, 1), donate_argnums=0, num_stages=2, memory_limit=100_000, schedule="1f1b"
    ).plan(*args)
    short = [row for row in plan.search.trail if row.outcome == TOO_LARGE and row.microbatches == (1,)]
    assert short and all(row.missing_bytes and "stage" in row.why for row in short)
    assert re.search(r"1: pipeline, too large by .* a device", plan.explain("microbatches"))


def test_a_file_keeps_the_trail_and_the_command_line_tells_it(free: Plan, tmp_path) -> None:
    free.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.search.trail == free.search.trail and loaded == free
    for topic in TOPICS:
        told = CliRunner().invoke(main, ["explain", str(tmp_path / "plan.json"), topic])
        assert told.exit_code == 0 and told.output.rstrip("\n") == free.explain(topic).rstrip("\n")
    page = plan_page(loaded)
    assert "alternatives that the search closed" in page and free.search.trail[-1].why in page
    bare = replace(free, details=type(free.details)())
    assert "no trail" in bare.explain("stages")
    with pytest.raises(PlanMismatchError):
        free.explain("schedules")


def test_schedules_that_are_timed_with_the_same_stages_are_told() -> None:
    step, args = perceptron(64, 64, 64)
    plan = autopar.parallelize(step, cluster=toy(), num_stages=2, num_microbatches=4).plan(*args)
    told = plan.explain("schedule")
    assert told.startswith(f"schedule: {plan.schedule} chosen")
    assert {"1f1b", "zb-h1", "eager-1f1b"} <= set(re.findall(r"[\w-]+", told))


@pytest.mark.parametrize("options", [{}, {"num_stages": 2}, {"memory_limit": 60_000}], ids=["free", "two", "short"])
def test_rows_have_the_work_of_the_whole_search(options) -> None:
    step, args = perceptron(64, 64, 32, 64, 64)
    cluster = toy(2, 2)
    search = autopar.parallelize(step, cluster=cluster, **options).plan(*args).search
    told = sum(row.work for row in search.trail)
    assert 0.9 * search.work <= told <= search.work  # tracing forms again is of no region


def test_what_was_asked_for_is_the_reason_that_others_are_left_out() -> None:
    step, args = perceptron(64, 64, 64)
    plan = autopar.parallelize(step, cluster=toy(), num_stages=1, mesh_shape=(4,)).plan(*args)
    (row,) = (row for row in plan.search.trail if row.outcome == LEFT_OUT)
    assert row.stages == ((2, 4),) and "num_stages=1 is asked for" in row.why
    assert "mesh: 4 chosen" in plan.explain("mesh")


def test_a_table_has_few_rows_and_all_numbers_and_work() -> None:
    trail = Trail()
    for stages in range(2, 40):
        for count in (1, 2, 4, 8):
            trail.close(Region.of_stages("pipeline", [stages], [count]), Bounded("a bound", stages / count), 10)
        trail.close(Region.of_stages("pipeline", [stages], [16]), Planned(float(stages)), 100)
    table = trail.table()
    assert len(table) <= MOST_ROWS and sum(row.work for row in table) == 38 * 140
    assert sum(row.regions for row in table) == 38 * 5
    assert {n for row in table for first, last in row.stages for n in range(first, last + 1)} == set(range(2, 40))
    assert min(row.seconds for row in table if row.outcome == PLANNED) == 2.0
    assert min(row.least_s for row in table if row.outcome == BOUNDED) == 2 / 8


def test_errors_say_an_outcome() -> None:
    assert outcome_of(MicrobatchError("no such number"), 100) == Impossible("no such number")
    assert outcome_of(InfeasiblePlanError("too much", least_bytes=130), 100) == TooLarge("too much", 30)
    trail = Trail()
    trail.close(Region("pipeline"), LeftOut("x" * 1000))
    assert trail.rows[0].outcome == LEFT_OUT and len(trail.rows[0].why) < 200


def test_ranges_of_numbers() -> None:
    assert ranges_of([5, 1, 2, 7, 6, 2]) == ((1, 2), (5, 7))
    assert ranges_text(((1, 2), (5, 7), (9, 9))) == "1, 2, 5-7, 9"


def test_a_strategy_that_says_the_number_of_stages() -> None:
    """The trail has the number that it says as planned, and leaves the others out with that rule."""
    step, args = perceptron(64, 64, 32, 64, 64)
    plan = autopar.parallelize(step, cluster=toy(2, 2), search=Manual(pp=2, dp=2), donate_argnums=0).plan(*args)
    rows = {n: row for row in plan.details.trail for first, last in row.stages for n in range(first, last + 1)}
    assert {n: row.outcome for n, row in rows.items()} == {1: LEFT_OUT, 2: PLANNED, 3: LEFT_OUT, 4: LEFT_OUT}
    assert rows[2].seconds == plan.step_time
    assert rows[4].why == "manual says the number of stages"
