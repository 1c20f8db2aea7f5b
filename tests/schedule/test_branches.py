"""Stages that are a graph: order, forms, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Table, Task, build, chain, check_table, get, parse_table, to_csv, to_json, to_text
from autopar.simulate import equal_stages, run, step_of


@st.composite
def graphs(draw):
    """A graph of stages, and workers of them."""
    count = draw(st.integers(1, 6))
    after = tuple(tuple(sorted(draw(st.sets(st.integers(0, s - 1), max_size=3)))) if s else () for s in range(count))
    most = draw(st.integers(1, count))
    workers = [draw(st.integers(0, most - 1)) for _ in range(count)]
    numbers = {w: n for n, w in enumerate(sorted(set(workers)))}
    return after, tuple(numbers[w] for w in workers)


@given(graph=graphs(), microbatches=st.integers(1, 6), trains=st.booleans())
def test_any_graph_of_stages_runs(graph, microbatches, trains):
    after, workers = graph
    table = get("branches", after=after, workers=workers, trains=trains).table(len(after), microbatches)
    assert check_table(table) is table
    assert [table.worker_of(Task("forward", s, 0)) for s in range(len(after))] == list(workers)
    assert table.kinds == (("forward", "backward") if trains else ("forward",))
    for form in (to_text, to_csv, to_json):
        assert parse_table(form(table)) == table


@given(graph=graphs(), microbatches=st.integers(1, 5))
def test_the_step_of_a_table_is_that_of_its_instruction_lists(graph, microbatches):
    after, workers = graph
    table = get("branches", after=after, workers=workers).table(len(after), microbatches)
    dataflow = chain(table)
    sinks = [s for s in range(len(after)) if not table.stages_after(s)]
    if len(sinks) > 1:
        return  # the dataflow has its loss on the last stage
    durations = equal_stages(table, dataflow, {"forward": 1, "backward": 2, "weight": 0}, 0.25)
    assert step_of(table, dataflow, durations).seconds == run(build(table, dataflow), durations).step_time


@pytest.mark.parametrize("towers", [2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_equal_towers_take_the_time_of_one(towers, microbatches):
    after = (*((),) * towers, tuple(range(towers)))
    seconds = {}
    for workers in ((*range(towers), towers - 1), (0,) * (towers + 1)):
        table = get("branches", after=after, workers=workers).table(towers + 1, microbatches)
        dataflow = chain(table)
        durations = equal_stages(table, dataflow, {"forward": 1, "backward": 2, "weight": 0})
        durations = replace(
            durations,
            work_s={w: 0.01 if w.stage == towers and w.kind != "update" else s for w, s in durations.work_s.items()},
        )
        seconds[max(workers) + 1] = run(build(table, dataflow), durations).step_time
    assert seconds[1] == pytest.approx(microbatches * (3 * towers + 0.02))
    assert seconds[towers] <= microbatches * 3.02 + 3


def test_refusals():
    with pytest.raises(ScheduleError, match="made for a graph of 3 stages, not 4"):
        get("branches", after=((), (), (0, 1))).table(4, 2)
    with pytest.raises(ScheduleError, match="stage 1 waits for 2"):
        get("branches", after=((), (2,), ())).table(3, 1)
    rows = ((Task("forward", 0, 0),), (Task("forward", 1, 0),))
    with pytest.raises(ScheduleError, match="of 1 stages what they wait for"):
        check_table(Table("mine", 2, 1, rows, ((),)))
    with pytest.raises(ScheduleError, match="does not say what each stage waits for"):
        parse_table("schedule mine, 2 stages, 1 microbatches, after - | x\n0 | F0.0\n1 | F1.0\n")
