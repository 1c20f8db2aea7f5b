"""The step time from the table alone, against the simulated instruction lists."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Dataflow, Send, ValueSpec, Work, WorkSpec, build, get, schedules
from autopar.simulate import Durations, is_plain, run, step_of

#: Schedules of a chain of stages, as the dataflows here are; those of graphs: `tests.schedule.test_branches`.
NAMES = [name for name in schedules() if name not in ("table", "branches")]


@st.composite
def flows(draw, table):
    """What a plan records of a pipeline: values to the next stages and further ones, and back."""
    stages, kinds = table.num_stages, table.kinds
    works, values = [], []
    skips = draw(st.lists(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)), max_size=3))
    pairs = [(s, s + 1) for s in range(stages - 1)] + [(a, b) for a, b in skips if a < b]
    names = [(f"y{n}", a, b) for n, (a, b) in enumerate(pairs)]
    late = [draw(st.booleans()) for _ in names]  # read by the later stage's backward pass alone
    for s in range(stages):
        values += [ValueSpec(f"state@{s}", 3, "step", stages=(s,)), ValueSpec(f"held@{s}", 2, "microbatch")]
        arriving = [n for (n, _, b), wait in zip(names, late, strict=True) if b == s and not (wait and len(kinds) > 1)]
        leaving = [n for n, a, _ in names if a == s]
        values += [ValueSpec(n, 1, "microbatch") for n in leaving]
        works.append(WorkSpec(Work("forward", s), (f"state@{s}", *arriving), (f"held@{s}", *leaving)))
        if len(kinds) > 1:
            back = [f"d{n}" for n, _, b in names if b == s]
            values += [ValueSpec(n, 1, "microbatch") for n in back]
            waited = [n for (n, _, b), wait in zip(names, late, strict=True) if b == s and wait]
            reads = (f"state@{s}", f"held@{s}", *waited, *(f"d{n}" for n, a, _ in names if a == s))
            values.append(ValueSpec(f"gradients@{s}", 3, "accumulator", reduce="sum"))
            if table.splits_backward:
                values.append(ValueSpec(f"kept@{s}", 1, "microbatch"))
                works.append(WorkSpec(Work("backward", s), reads, (*back, f"kept@{s}")))
                works.append(WorkSpec(Work("weight", s), (f"held@{s}", f"kept@{s}"), (), (f"gradients@{s}",)))
            else:
                works.append(WorkSpec(Work("backward", s), reads, tuple(back), (f"gradients@{s}",)))
            works.append(WorkSpec(Work("update", s), (f"state@{s}", f"gradients@{s}")))
    return Dataflow(tuple(works), tuple(values))


@st.composite
def cases(draw):
    """A table of any schedule, a dataflow and durations."""
    schedule = get(draw(st.sampled_from(NAMES)))
    workers = draw(st.sampled_from([1, 2, 3, 4]))
    if schedule.name == "chimera":
        workers = 2 * ((workers + 1) // 2)
    table = schedule.table(workers * schedule.chunks, draw(st.sampled_from([2, 4, 6])) * workers)
    dataflow = draw(flows(table))
    seconds = st.floats(0, 5, allow_nan=False) | st.integers(0, 5)
    work_s = {spec.work: draw(seconds) for spec in dataflow.works}
    sent = {
        (v.name, a, b): draw(seconds)
        for v in dataflow.values
        if not v.is_input
        for a in range(table.num_workers)
        for b in range(table.num_workers)
        if draw(st.booleans())
    }
    return table, dataflow, Durations(work_s, sent, draw(seconds))


@settings(max_examples=60)
@given(cases())
def test_the_time_of_a_table_is_that_of_its_instruction_lists(case):
    table, dataflow, durations = case
    assert is_plain(dataflow)
    program = build(table, dataflow)
    found = step_of(table, dataflow, durations)
    assert found.seconds == run(program, durations).step_time
    sends = {(i.value.value, w.worker, i.to) for w in program.workers for i in w.instructions if isinstance(i, Send)}
    assert found.routes == tuple(sorted(sends))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_of_unequal_stages(name):
    schedule = get(name)
    table = schedule.table(4 * schedule.chunks, 8)
    works = [
        WorkSpec(Work(kind, s), tuple(reads), tuple(writes))
        for s in range(table.num_stages)
        for kind, reads, writes in _passes(table, s)
    ]
    values = {n for w in works for n in (*w.reads, *w.writes)}
    dataflow = Dataflow(tuple(works), tuple(ValueSpec(n, 1, "microbatch") for n in sorted(values)))
    durations = Durations({w.work: 1 + w.work.stage % 3 + len(w.work.kind) for w in works}, {}, 0.5)
    found = step_of(table, dataflow, durations)
    assert found.seconds == run(build(table, dataflow), durations).step_time > 8 * min(durations.work_s.values())


def _passes(table, s):
    last = table.num_stages - 1
    yield "forward", [f"y{s - 1}"] * (s > 0), [f"y{s}"] * (s < last) + [f"h{s}"] * (len(table.kinds) > 1)
    if len(table.kinds) > 1:
        yield (
            "backward",
            [f"h{s}", *([f"d{s}"] if s < last else [])],
            [f"d{s - 1}"] * (s > 0) + [f"k{s}"] * table.splits_backward,
        )
    if table.splits_backward:
        yield "weight", [f"k{s}"], []


def _plain():
    works = (
        WorkSpec(Work("forward", 0), ("w",), ("y",)),
        WorkSpec(Work("forward", 1), ("y",), (), ("loss",)),
        WorkSpec(Work("update", 1), ("loss",)),
    )
    values = (
        ValueSpec("w", 1, "step", stages=(0,)),
        ValueSpec("y", 1, "microbatch"),
        ValueSpec("loss", 1, "accumulator", reduce="sum"),
    )
    return Dataflow(works, values)


def _with(flow, name, **changes):
    values = tuple(dataclasses.replace(v, **changes) if v.name == name else v for v in flow.values)
    return dataclasses.replace(flow, values=values)


def test_what_is_not_plain():
    flow = _plain()
    assert is_plain(flow)
    assert not is_plain(_with(flow, "y", host=True))
    assert not is_plain(_with(flow, "w", lifetime="microbatch"))
    assert not is_plain(_with(flow, "w", stages=(1,)))
    assert not is_plain(_with(flow, "loss", reduce="concatenate"))
    other = (*flow.works, WorkSpec(Work("update", 0), ("loss",)))
    assert not is_plain(dataclasses.replace(flow, works=other))
    assert not is_plain(dataclasses.replace(flow, works=(*flow.works, WorkSpec(Work("before", 0), ("w",)))))


def test_what_is_read_too_early_is_refused():
    table = get("inference").table(2, 2)
    flow = Dataflow(
        (WorkSpec(Work("forward", 0), ("back",), ("y",)), WorkSpec(Work("forward", 1), ("y",), ("back",))),
        (ValueSpec("y", 1, "microbatch"), ValueSpec("back", 1, "microbatch")),
    )
    with pytest.raises(ScheduleError, match="waits for ever"):
        step_of(table, flow, Durations({w.work: 1 for w in flow.works}))
