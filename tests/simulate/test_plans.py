"""`autopar.simulate(plan)` and the command."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.errors import PlanMismatchError
from autopar.plan import Plan
from autopar.schedule import build, chain, get
from autopar.simulate import Durations, equal_stages, parts_of, record_of, routes_of, run
from tests.plan.plans import small_plan


def with_pipeline(name="1f1b", workers=2, microbatches=4):
    schedule = get(name)
    table = schedule.table(workers * schedule.chunks, microbatches)
    dataflow = chain(table, activation_bytes=100, boundary_bytes=10, parameter_bytes=1000, global_norm=True)
    durations = equal_stages(table, dataflow, {"forward": 1.0, "backward": 2.0, "weight": 1.0}, 0.25)
    record = record_of(table, dataflow, durations, routes_of(build(table, dataflow)))
    content = small_plan().content
    stages = tuple(content.stages[s % len(content.stages)] for s in range(table.num_stages))
    plan = Plan(msgspec.structs.replace(content, stages=stages, pipeline=record))
    return plan, table, dataflow, durations


def one_stage():
    content = small_plan().content
    return Plan(msgspec.structs.replace(content, stages=content.stages[:1]))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera", "interleaved", "inference"])
def test_a_plan_carries_its_pipeline(name):
    plan, table, dataflow, durations = with_pipeline(name)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert parts_of(again)[:2] == (table, dataflow)
    assert autopar.simulate(again).events == run(build(table, dataflow), durations).events


def test_plans_without_a_pipeline_have_the_file_that_they_had():
    text = small_plan().to_json()
    assert "pipeline" not in json.loads(text)["plan"]
    assert Plan.from_json(text).content.pipeline is None


def test_one_stage_is_one_worker():
    plan = one_stage()
    timeline = autopar.simulate(plan)
    assert timeline.num_workers == 1
    assert len(timeline.events) == plan.num_microbatches
    assert timeline.step_time == pytest.approx(plan.stages[0].step_time)
    assert timeline.peak_memory == plan.stages[0].memory.total
    assert timeline.bubble_fraction == pytest.approx(0)


def test_several_stages_without_a_record_are_refused():
    with pytest.raises(PlanMismatchError, match="no record of its pipeline"):
        autopar.simulate(small_plan())


def test_transfers_of_the_record_take_time():
    plan, table, dataflow, durations = with_pipeline()
    without = run(build(table, dataflow), Durations(durations.work_s))
    assert autopar.simulate(plan).step_time > without.step_time


def test_the_command(tmp_path):
    plan = tmp_path / "plan.json"
    with_pipeline()[0].save(plan)

    def call(*args):
        done = CliRunner().invoke(main, ["simulate", str(plan), *args])
        assert done.exit_code == 0, done.output
        return done.output

    assert "bubble" in call()
    assert json.loads(call("--format", "json"))["step_time"] == autopar.simulate(Plan.load(plan)).step_time
    assert call("--format", "svg").startswith("<svg")
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    assert "bubble" in call("-o", str(trace), "--depth", "1")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    call("-o", str(picture))
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_the_command_refuses_what_it_cannot_simulate(tmp_path):
    plan = tmp_path / "plan.json"
    small_plan().save(plan)
    done = CliRunner().invoke(main, ["simulate", str(plan)])
    assert done.exit_code == 1
    assert "no record of its pipeline" in done.stderr
