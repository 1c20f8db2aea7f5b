"""The simulator: memory, sending, bounded queues, pictures and traces."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Work, build, chain, get, schedules, verify
from autopar.simulate import Durations, Event, Timeline, run
from tests.simulate.helpers import simulated

NAMES = [name for name in schedules() if name != "table"]


@st.composite
def runs(draw):
    """A program of any schedule with uneven durations, and those."""
    schedule = get(draw(st.sampled_from(NAMES)))
    workers = draw(st.sampled_from([2, 4]))
    table = schedule.table(workers * schedule.chunks, draw(st.integers(1, 2)) * workers)
    sizes = {n: draw(st.integers(0, 9)) for n in ("activation_bytes", "boundary_bytes", "parameter_bytes")}
    dataflow = chain(table, global_norm=draw(st.booleans()), **sizes)
    work_s = {spec.work: draw(st.integers(0, 5)) for spec in dataflow.works}
    return build(table, dataflow), Durations(work_s, {}, draw(st.integers(0, 3)))


@settings(max_examples=20)
@given(runs(), st.sampled_from([None, 1, 2]))
def test_a_simulated_step_keeps_the_rules(found, depth):
    program, durations = found
    timeline = run(program, durations, depth)
    table = program.table
    assert tuple(timeline.peak_memory_of(w) for w in range(table.num_workers)) == verify(program).peak_bytes
    ends = {}
    for worker in range(table.num_workers):
        events = timeline.computing(worker)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(events))
        for e in events:
            assert e.end_s - e.start_s == durations.work_s[Work(e.kind, e.stage, 1 if "part 1" in e.name else 0)]
            ends[e.kind, e.stage, e.microbatch] = e
    for task in (t for row in table.rows for t in row):
        for need in table.needs(task):
            before, after = (ends[t.kind, t.stage, t.microbatch] for t in (need, task))
            far = durations.other_transfer_s if before.worker != after.worker else 0
            assert after.start_s >= before.end_s + far
    for _, sent in itertools.groupby(
        sorted((e for e in timeline.events if not e.computes), key=lambda e: (e.worker, e.target, e.start_s)),
        key=lambda e: (e.worker, e.target),
    ):
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(sent))
    for line in timeline.memory:
        assert all(a[0] <= b[0] for a, b in itertools.pairwise(line))
    unbounded = run(program, durations)
    assert timeline.step_time >= unbounded.step_time
    assert 0 <= timeline.bubble_fraction <= 1


def test_sending_runs_beside_computing():
    # Each of the three later microbatches is sent while the next is computed; only the first is waited for.
    assert simulated("inference", 2, 4, forward=2, transfer=1).step_time == 4 * 2 + 1 + 2
    # A link slower than computing sets the pace: four transfers one behind the other.
    assert simulated("inference", 2, 4, forward=2, transfer=5).step_time == 2 + 4 * 5 + 2


def test_eager_hides_what_1f1b_waits_for():
    plain, eager = (simulated(n, 4, 12, 2, 4, transfer=1).step_time for n in ("1f1b", "eager-1f1b"))
    assert eager < plain


def test_short_queues_hold_the_sender_back():
    """The second worker is slow; with one place in the queue the first cannot run ahead."""
    table = get("inference").table(2, 6)
    dataflow = chain(table)
    program = build(table, dataflow)
    durations = Durations({Work("forward", 0): 1, Work("forward", 1): 5})
    free, bound = (run(program, durations, depth) for depth in (None, 1))
    assert free.step_time == bound.step_time == 1 + 6 * 5
    assert max(e.end_s for e in free.computing(0)) == 6
    assert max(e.end_s for e in bound.computing(0)) > 6


def test_a_work_without_duration_is_an_error():
    table = get("1f1b").table(2, 2)
    with pytest.raises(ScheduleError, match="how long"):
        run(build(table, chain(table)), Durations({}))


@pytest.mark.parametrize("name", NAMES)
def test_traces_open(name, tmp_path):
    timeline = simulated(name, 4, 4, Fraction(1, 3), Fraction(2, 3), transfer=Fraction(1, 7))
    timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert {e["pid"] for e in slices} == set(range(4))
    lanes = sorted(slices, key=lambda e: (e["pid"], e["tid"], e["ts"]))
    computing = [e for e in lanes if e["tid"] == 0]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(computing) if a["pid"] == b["pid"])
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(float(timeline.step_time) * 1e6)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {f"worker {w}" for w in range(4)}
    counters = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(counters, default=0) == timeline.peak_memory
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("before", encoding="utf-8")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        simulated("1f1b", 2, 2).save(path)
    assert path.read_text(encoding="utf-8") == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_well_formed(name, tmp_path):
    timeline = simulated(name, 4, 12, 2, 4, 2, transfer=1)
    timeline.save(tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    boxes = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert len(boxes) == sum(e.end_s > e.start_s for e in timeline.events)
    assert len(list(root.iter(f"{space}polyline"))) == 4
    width = float(root.get("viewBox").split()[2])
    assert all(float(b.get("x")) >= 0 and float(b.get("x")) + float(b.get("width")) <= width for b in boxes)


def test_text_of_1f1b():
    assert str(simulated("1f1b", 2, 3)) == (
        "0 │0──1──······₀━━━━━2──₁━━━━━···₂━━━━━│\n"
        "1 │···0──₀━━━━━1──₁━━━━━2──₂━━━━━······│\n"
        "1─ forward  ₁━ backward  · waits\n"
        "simulated: step 12 s, bubble 25.0%, peak memory 2 B a device\n"
    )


@pytest.mark.few(40)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 10, 80])
def test_text_keeps_to_its_width(name, columns):
    lines = simulated(name, 4, 16, 3, 5, 2).to_text(columns).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert len(lines[0]) <= columns + 4


def test_json_of_a_timeline():
    found = json.loads(simulated("zb-v", 2, 4, Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)).to_json())
    assert found["step_time"] == 12.5
    assert [w["stages"] for w in found["workers"]] == [[0, 3], [1, 2]]
    assert len([e for e in found["events"] if e["kind"] == "weight"]) == 16


def test_a_measured_timeline_is_the_same_type():
    events = [Event(12.0, 13.0, 1, "forward", 1, 0, "forward 1"), Event(10.0, 12.0, 0, "forward", 0, 0, "forward 0")]
    timeline = Timeline.measured(2, events)
    assert timeline.step_time == 3.0
    assert timeline.bubble_fraction == 0.5
    assert (timeline.peak_memory, timeline.origin) == (0, "measured")
    assert "measured: step 3 s, bubble 50.0%\n" in timeline.to_text()
    assert ET.fromstring(timeline.to_svg()).tag.endswith("svg")
    empty = Timeline.measured(2, [])
    assert (empty.step_time, empty.bubble_fraction) == (0, 0)
    assert ET.fromstring(empty.to_svg()).tag.endswith("svg")
    assert "bubble 0.0%" in str(empty)
