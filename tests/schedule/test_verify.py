"""What the verifier refuses, with the message and the cell that it marks, and what the rarer instructions mean."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import (
    Accumulate,
    Apply,
    Buffer,
    Dataflow,
    Fetch,
    Free,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
    ValueSpec,
    Work,
    WorkerProgram,
    WorkSpec,
    build,
    chain,
    check_dataflow,
    free_early,
    get,
    made_by,
    place,
    schedules,
    usage,
    used_by,
    verify,
)
from tests.schedule.flows import rich
from tests.schedule.reference import Terms, expected, interpret

#: Schedules of a chain of stages, as the dataflows here are; those of graphs: `tests.schedule.test_branches`.
NAMES = [name for name in schedules() if name not in ("table", "branches")]


def program(name="1f1b", workers=2, microbatches=3, flow=chain) -> Program:
    schedule = get(name)
    table = schedule.table(workers * schedule.chunks, microbatches)
    return build(table, flow(table))


def with_lines(p: Program, worker: int, lines) -> Program:
    workers = list(p.workers)
    workers[worker] = WorkerProgram(worker, tuple(lines))
    return msgspec.structs.replace(p, workers=tuple(workers))


def find(p: Program, worker: int, kind: type, number: int = 0, **fields) -> int:
    lines = p.workers[worker].instructions
    found = [
        n for n, i in enumerate(lines) if isinstance(i, kind) and all(getattr(i, k) == v for k, v in fields.items())
    ]
    return found[number]


def changed(p: Program, worker: int, at: int, **change) -> Program:
    lines = list(p.workers[worker].instructions)
    lines[at] = msgspec.structs.replace(lines[at], **change)
    return with_lines(p, worker, lines)


def without(p: Program, worker: int, at: int) -> Program:
    lines = list(p.workers[worker].instructions)
    del lines[at]
    return with_lines(p, worker, lines)


def refused(p: Program, match: str, cell: str | None = None, depth: int = 1) -> str:
    with pytest.raises(ScheduleError, match=match) as caught:
        verify(p, depth)
    text = str(caught.value)
    if cell is not None:
        assert f">{cell}<" in text
    return text


def test_a_missing_gradient():
    p = program()
    at = find(p, 0, Accumulate, value=Buffer("g0", 1))
    refused(without(p, 0, at), "g0 lacks the contribution of microbatch 1", "B0.2")


def test_a_gradient_twice():
    p = program()
    at = find(p, 0, Accumulate, value=Buffer("g0", 1))
    once = changed(p, 0, at, donate=False)
    lines = list(once.workers[0].instructions)
    lines.insert(at, lines[at])
    refused(with_lines(p, 0, lines), "microbatch 1 is accumulated twice", "B0.1")


def test_use_after_free_and_before_definition():
    p = program()
    lines = list(p.workers[0].instructions)
    at = find(p, 0, Run, work=Work("backward", 0), microbatch=0)
    lines.insert(at, Free((Buffer("k0", 0),)))
    text = refused(with_lines(p, 0, lines), r"k0\.0 is used after it was freed by instruction", "B0.0")
    assert "schedule 1f1b, worker 0, instruction" in text
    first, later = find(p, 0, Run, microbatch=0), find(p, 0, Run, number=1, microbatch=0)
    lines = list(p.workers[0].instructions)
    lines[first], lines[later] = lines[later], lines[first]
    refused(with_lines(p, 0, lines), "is used before it is there", "B0.0")


def test_the_microbatch_of_another():
    p = program()
    a = find(p, 1, Recv, value=Buffer("y0", 0))
    refused(changed(p, 1, a, value=Buffer("y0", 1)), r"y0 of microbatch \[0\] arrives there")
    at = find(p, 0, Run, work=Work("forward", 0), microbatch=1)
    i = p.workers[0].instructions[at]
    refused(
        changed(p, 0, at, reads=(i.reads[0], Buffer("x", 2)), donate=()), r"x is of microbatch \[2\], not \[1\]", "F0.1"
    )


def test_tags():
    p = program()
    a, b = find(p, 0, Send), find(p, 0, Send, number=1)
    lines = p.workers[0].instructions
    refused(changed(p, 0, b, tag=lines[a].tag), "was sent before")
    refused(changed(p, 0, b, tag=999), "has no RECV")
    refused(without(p, 0, b), "has no SEND")
    refused(changed(p, 0, a, to=0), "no other worker 0")
    a, b = find(p, 1, Recv), find(p, 1, Recv, number=1)
    lines = list(p.workers[1].instructions)
    lines[a], lines[b] = lines[b], lines[a]
    refused(with_lines(p, 1, lines), "the next value from worker 0 has tag")


def test_tasks_run_once_on_their_worker():
    p = program()
    at = find(p, 1, Run, microbatch=0)
    refused(changed(p, 1, at, microbatch=1), r"F1\.1|microbatch")
    refused(changed(p, 1, at, work=Work("forward", 0)), r"F0\.0 is not a task of worker 1")
    inference = program("inference")
    last = find(inference, 1, Run, microbatch=2)
    lines = list(inference.workers[1].instructions)
    refused(with_lines(inference, 1, lines[:last]), r"worker 1 never runs F1\.2", "F1.2")


def test_what_belongs_to_the_caller():
    p = program(flow=rich)
    lines = list(p.workers[0].instructions)
    refused(with_lines(p, 0, [*lines, Free((Buffer("new0"),))]), "new0 is freed, but belongs to the caller")
    refused(with_lines(p, 0, [*lines, Free((Buffer("rate"),))]), "rate is freed, but belongs to the caller")
    at = find(p, 0, Apply, work=Work("update", 0, 1))
    refused(without(p, 0, at), r"update 0 part 1 never ran", "B0.2")


def test_deadlock_by_order():
    """Both workers wait for what the other sends only later."""
    p = program("1f1b", 2, 2)
    lines = list(p.workers[0].instructions)
    lines.insert(find(p, 0, Send), lines.pop(find(p, 0, Recv)))
    text = refused(with_lines(p, 0, lines), "deadlock with queues of 1", "F0.0")
    assert "worker 0 waits at RECV d0.0" in text
    assert "worker 1 waits at RECV y0.0" in text


def exchange(count: int) -> Program:
    """Two independent stages of which each sends ``count`` values to the other before it takes any."""
    text = "0 | F0.0\n1 | F1.0\n"
    table = get("table", text=text).table(2, 1)
    names = [f"{way}{k}" for way in "ab" for k in range(count)]
    values = (
        *(ValueSpec(n, 1, "step", stages=(0 if n[0] == "a" else 1,), donated=True) for n in names),
        *(ValueSpec(f"out{s}", 1, "accumulator", reduce="sum", result=True) for s in range(2)),
    )
    works = tuple(WorkSpec(Work("forward", s), tuple(names), (), (f"out{s}",)) for s in range(2))
    flow = Dataflow(works, values)
    lists = []
    for s, (own, other) in enumerate((("a", "b"), ("b", "a"))):
        tag = {"a": 0, "b": count}
        lists.append(
            WorkerProgram(
                s,
                (
                    *(Send(Buffer(f"{own}{k}"), 1 - s, tag[own] + k) for k in range(count)),
                    *(Recv(Buffer(f"{other}{k}"), 1 - s, tag[other] + k) for k in range(count)),
                    Run(Work("forward", s), 0, tuple(map(Buffer, names)), (Buffer(f"out{s}", 0),)),
                    Accumulate(Buffer(f"out{s}"), Buffer(f"out{s}", 0), "sum", True, True),
                ),
            )
        )
    return Program(table, flow, tuple(lists))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_deadlock_by_short_queues(count):
    p = exchange(count)
    verify(p, depth=count)
    if count > 1:
        refused(p, f"deadlock with queues of {count - 1}", "F0.0", depth=count - 1)
    # The pass that places sends and receives makes lists for which one place is enough.
    verify(build(p.table, p.dataflow), depth=1)
    with pytest.raises(ScheduleError, match="let nothing through"):
        verify(p, depth=0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(workers=st.integers(1, 5), microbatches=st.integers(1, 8))
def test_any_dataflow_is_placed_without_deadlock(name, workers, microbatches):
    schedule = get(name)
    try:
        table = schedule.table(workers * schedule.chunks, microbatches)
    except ScheduleError:
        return
    p = build(table, rich(table), depth=1)
    terms = Terms()
    assert interpret(p, terms, microbatches) == expected(p, terms)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_goes_once_to_each_worker(name):
    p = program(name, 4, 4, rich)
    pairs = [(w.worker, i.to, i.value) for w in p.workers for i in w.instructions if isinstance(i, Send)]
    assert len(set(pairs)) == len(pairs)
    tags = [i.tag for w in p.workers for i in w.instructions if isinstance(i, Send)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flow", [chain, rich])
def test_buffers_are_given_up_by_their_last_use(name, flow):
    """After the last instruction that uses it no buffer is left, but for what belongs to the caller."""
    p = program(name, 2, 4, flow)
    table, dataflow = p.table, p.dataflow
    for w in p.workers:
        last = {}
        given_up = {}
        for number, i in enumerate(w.instructions):
            for b in (*used_by(i), *made_by(i)):
                if not isinstance(i, Free):
                    last[b] = number
            if isinstance(i, Accumulate):
                given_up.update({i.value: number} if i.donate else {})
            for b in i.values if isinstance(i, Free) else i.donate if isinstance(i, Run | Apply) else ():
                given_up[b] = number
        for b, number in last.items():
            spec = dataflow.by_name[b.value]
            mine = spec.stages or (dataflow.writers[b.value].stage,)
            at_home = any(w.worker in table.workers_of_stage(s) for s in mine)
            caller = at_home and (not spec.donated if spec.stages else spec.result and b == Buffer(b.value))
            assert (b in given_up) != caller
            if b in given_up:
                assert given_up[b] - number in (0, 1)
    assert free_early(table, dataflow, p.workers) == p.workers
    assert max(verify(p).peak_bytes) <= max(
        max(u.during_bytes for u in line) for line in usage(Program(table, dataflow, place(table, dataflow)))
    )


def test_donated_parameters_are_updated_in_place():
    table = get("1f1b").table(1, 1)
    flow = chain(table, activation_bytes=0, parameter_bytes=100)
    # Parameter and gradient; the new parameter is where the old one was.
    assert verify(build(table, flow)).peak_bytes == (200,)
    kept = dataclasses.replace(
        flow, values=tuple(dataclasses.replace(v, donated=False) if v.name == "w0" else v for v in flow.values)
    )
    assert verify(build(table, kept)).peak_bytes == (300,)


def spliced(*extra, at: int) -> Program:
    p = program("gpipe", 1, 2)
    lines = list(p.workers[0].instructions)
    lines[at:at] = extra
    return with_lines(p, 0, lines)


def test_offload_and_fetch():
    kept = Buffer("k0", 0)
    p = program("gpipe", 1, 2)
    first, second = find(p, 0, Run), find(p, 0, Run, number=1)
    back = find(p, 0, Run, work=Work("backward", 0), microbatch=0)
    both = spliced(Offload(kept), at=first + 1)
    lines = list(both.workers[0].instructions)
    lines.insert(back + 1, Fetch(kept))
    there_and_back = with_lines(p, 0, lines)
    assert verify(there_and_back).peak_bytes == (1,)
    assert verify(p).peak_bytes == (2,)
    refused(both, r"k0\.0 is on the host", "B0.0")
    refused(spliced(Fetch(kept), at=second), r"k0\.0 is not on the host")
    refused(spliced(Offload(kept), Offload(kept), at=second), "is on the host")


def test_stash_keeps_contents_and_takes_memory():
    """The parameter is kept as a version that backward reads instead."""
    table = get("gpipe").table(1, 2)
    flow = chain(table, activation_bytes=0, parameter_bytes=10)
    p = build(table, flow)
    version = Buffer("w0", 0)
    lines = [Stash(Buffer("w0"), version), *p.workers[0].instructions]
    at = next(n for n, i in enumerate(lines) if isinstance(i, Run) and i.work.kind == "backward")
    lines[at] = msgspec.structs.replace(lines[at], reads=(version, *lines[at].reads[1:]))
    assert verify(with_lines(p, 0, lines)).peak_bytes[0] == verify(p).peak_bytes[0] + 10
    lines[0] = Stash(Buffer("x", 0), version)
    refused(with_lines(p, 0, lines), r"backward 0 is given x for w0")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: dataclasses.replace(f, works=f.works[1:]), "there is no work forward 0"),
        (lambda f: dataclasses.replace(f, values=f.values[1:]), "names x, which is no value"),
        (lambda f: dataclasses.replace(f, values=(*f.values, f.values[0])), "value x is there 2 times"),
        (lambda f: dataclasses.replace(f, works=(*f.works, f.works[0])), "work forward 0 is there 2 times"),
        (
            lambda f: dataclasses.replace(f, works=(*f.works, WorkSpec(Work("weight", 0)))),
            "no task runs work weight 0",
        ),
        (
            lambda f: dataclasses.replace(f, works=(*f.works, WorkSpec(Work("update", 9)))),
            "update 9 is of a stage that no worker has",
        ),
        (
            lambda f: dataclasses.replace(f, values=(*f.values, ValueSpec("q", 1, "step"))),
            "q is no input and never written",
        ),
        (
            lambda f: dataclasses.replace(f, works=(*f.works, WorkSpec(Work("update", 0, 2), ("k0",)))),
            r"update 0 part 2 reads k0 \(microbatch",
        ),
        (
            lambda f: dataclasses.replace(f, works=(*f.works, WorkSpec(Work("before", 0), ("new0",)))),
            r"before 0 reads new0",
        ),
        (
            lambda f: dataclasses.replace(f, works=(*f.works, WorkSpec(Work("before", 0), aliases=(("a", "b"),)))),
            "aliases a and b",
        ),
    ],
)
def test_dataflows_that_do_not_fit(change, match):
    table = get("1f1b").table(2, 2)
    with pytest.raises(ScheduleError, match=match):
        check_dataflow(table, change(chain(table)))
    check_dataflow(table, chain(table))


def test_a_value_made_too_late_is_refused():
    """Stage 0 reads in forward what stage 1 makes in forward."""
    table = get("inference").table(2, 2)
    values = (ValueSpec("a", 1, "microbatch"), ValueSpec("out", 1, "accumulator", reduce="sum", result=True))
    works = (WorkSpec(Work("forward", 0), ("a",), (), ("out",)), WorkSpec(Work("forward", 1), (), ("a",)))
    with pytest.raises(ScheduleError, match=r"F0\.0 reads a\.0, which forward 1 makes only later") as caught:
        build(table, Dataflow(works, values))
    assert ">F0.0<" in str(caught.value)


def test_lists_for_other_workers():
    p = program()
    refused(msgspec.structs.replace(p, workers=p.workers[:1]), "the table has 2 workers")
    with pytest.raises(ScheduleError, match="not a program of instructions"):
        Program.from_json("{}")


def test_bytes_on_their_way():
    """The first of three workers sends activations and takes gradients; the second does so on both sides."""
    table = get("1f1b").table(3, 4)
    p = build(table, chain(table, boundary_bytes=10))
    assert verify(p, depth=1).transit_bytes == (20, 40, 20)
    assert verify(p, depth=2).transit_bytes == (40, 80, 40)
    # A pair sends four values a step, no more.
    assert verify(p, depth=99).transit_bytes == (80, 160, 80)
    assert verify(build(table, chain(table))).transit_bytes == (0, 0, 0)


def test_concatenated_values_are_whole_where_they_are_sent():
    """Stage 0 reads in its update what stage 1 has concatenated: four pieces of three bytes."""
    table = get("inference").table(2, 4)
    values = (
        ValueSpec("x", 0, "microbatch", stages=(0,)),
        ValueSpec("y", 0, "microbatch"),
        ValueSpec("rows", 3, "accumulator", reduce="concatenate"),
        ValueSpec("mean", 1, "step", result=True),
    )
    works = (
        WorkSpec(Work("forward", 0), ("x",), ("y",)),
        WorkSpec(Work("forward", 1), ("y",), (), ("rows",)),
        WorkSpec(Work("update", 0), ("rows",), ("mean",)),
    )
    p = build(table, Dataflow(works, values))
    assert verify(p).peak_bytes == (13, 12)
    assert verify(p).transit_bytes == (12, 12)
