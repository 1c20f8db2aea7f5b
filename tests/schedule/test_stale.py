"""Instruction lists without a flush, read by the audit: versions and microbatches in flight are the papers'."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from autopar.errors import ScheduleError
from autopar.schedule import Buffer, Dataflow, Free, Run, Stash, ValueSpec, Work, WorkerProgram, WorkSpec
from autopar.schedule.without_flush.lists import METRICS, SHARED, STATE, StaleFlow, windows
from autopar.schedule.without_flush.schedules import VersionMap
from autopar.schedule.without_flush.verify import audit_lists


def chain(stages: int) -> tuple[Dataflow, dict[str, str]]:
    """Stages in a row with a parameter each, a skip connection whose value is read backward, and a count on all."""
    last = stages - 1
    values = [
        ValueSpec("x", 2, "microbatch", stages=(0,)),
        ValueSpec("labels", 2, "microbatch", stages=(last,)),
        ValueSpec("loss", 1, "accumulator", reduce="sum"),
        ValueSpec("rows", 1, "accumulator", reduce="concatenate"),
        ValueSpec("out/loss", 1, "step", result=True),
        ValueSpec("skip", 1, "microbatch"),
    ]
    works, replaces = [], {}
    for s in range(stages):
        values += [
            ValueSpec(f"w@{s}", 5, "step", stages=(s,)),
            ValueSpec(f"count@{s}", 1, "step", stages=(s,)),
            ValueSpec(f"loop@{s}", 5, "step"),
            ValueSpec(f"k{s}", 3, "microbatch"),
            ValueSpec(f"g{s}", 5, "accumulator", reduce="sum"),
            ValueSpec(f"new{s}", 5, "step"),
            ValueSpec(f"count/{s}", 1, "step"),
        ]
        works.append(WorkSpec(Work("before", s), (f"w@{s}",), (f"loop@{s}",)))
        reads = [f"w@{s}", f"loop@{s}", f"y{s - 1}" if s else "x", *(["labels"] if s == last else [])]
        writes = [f"k{s}", *([f"y{s}"] if s < last else []), *(["skip"] if s == 0 else [])]
        works.append(WorkSpec(Work("forward", s), tuple(reads), tuple(writes), ("loss", "rows") if s == last else ()))
        back = [f"w@{s}", f"k{s}", *([f"d{s}"] if s < last else ["skip"] if stages > 1 else [])]
        works.append(WorkSpec(Work("backward", s), tuple(back), (f"d{s - 1}",) if s else (), (f"g{s}",)))
        if s < last:
            values += [ValueSpec(f"y{s}", 2, "microbatch"), ValueSpec(f"d{s}", 2, "microbatch")]
        works.append(WorkSpec(Work("update", s, STATE), (f"w@{s}", f"g{s}", f"count@{s}"), (f"new{s}",)))
        works.append(WorkSpec(Work("update", s, SHARED), (f"count@{s}",), (f"count/{s}",)))
        replaces |= {f"new{s}": f"w@{s}", f"count/{s}": f"count@{s}"}
    works.append(WorkSpec(Work("update", last, METRICS), ("loss", "rows"), ("out/loss",)))
    return Dataflow(tuple(works), tuple(values)), replaces


def flow_of(name: str, stages: int, microbatches: int) -> StaleFlow:
    dataflow, replaces = chain(stages)
    return StaleFlow(dataflow, VersionMap(name, stages, microbatches), microbatches, replaces)


def expected(name: str, stages: int, stage: int, m: int, k: int) -> int:
    """The papers' formulas, written down a second time."""
    if name == "2bw":
        return max(k // m - 1, 0)
    return max(k - (stages - 1) + (stage if name == "pipedream" else 0), 0)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(("stages", "m"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (5, 64), (7, 8), (16, 16), (16, 64)])
def test_lists_keep_to_the_versions_of_the_papers(name, stages, m):
    found = audit_lists(windows(flow_of(name, stages, m)), calls=4)
    assert len(found.reads) == 2 * stages * 4 * m
    for (_, s, k), version in found.reads.items():
        assert version == expected(name, stages, s, m, k)
    assert found.in_flight == tuple(stages - s for s in range(stages))
    most = {"pipedream": lambda s: stages - s, "pipedream-vertical": lambda s: stages, "2bw": lambda s: 2}[name]
    assert found.versions == tuple(most(s) for s in range(stages))
    assert set(found.updates) == {4 if name == "2bw" else 4 * m}


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical"])
@pytest.mark.parametrize(("stages", "m"), [(2, 1), (4, 1), (4, 2), (5, 3), (9, 2)])
def test_a_call_may_bring_fewer_microbatches_than_there_are_stages(name, stages, m):
    found = audit_lists(windows(flow_of(name, stages, m)), calls=20)
    for (_, s, k), version in found.reads.items():
        assert version == expected(name, stages, s, m, k)
    assert found.versions[0] == stages


def test_lists_repeat_once_the_pipeline_is_full():
    lists = windows(flow_of("pipedream", 4, 2))
    assert lists.call(2) is lists.call(9) is not lists.call(1)
    assert lists.call(2).starts == lists.call(2).ends


def broken(change):
    """Lists of 3 stages of which worker 0's instructions are changed."""
    whole = windows(flow_of("pipedream", 3, 4))
    last = whole.calls[-1]
    own = tuple(change(list(last.workers[0].instructions)))
    changed = replace(last, workers=(WorkerProgram(0, own), *last.workers[1:]))
    return replace(whole, calls=(*whole.calls[:-1], changed))


def without_first(kind, of=""):
    def change(lines):
        at = next(n for n, i in enumerate(lines) if isinstance(i, kind) and of in str(i))
        return lines[:at] + lines[at + 1 :]

    return change


def twice(kind, of=""):
    def change(lines):
        at = next(n for n, i in enumerate(lines) if isinstance(i, kind) and of in str(i))
        return [*lines[: at + 1], lines[at], *lines[at + 1 :]]

    return change


def newest(lines):
    """Forward passes read what the update writes in place of their version."""
    return [
        msgspec.structs.replace(
            i, reads=tuple(Buffer("w@0", b.microbatch + 1) if b.value == "w@0" else b for b in i.reads)
        )
        if isinstance(i, Run) and i.work.kind == "backward"
        else i
        for i in lines
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without_first(Stash, "w@0"), "is never there"),
        (without_first(Free), "begins with|is never there"),
        (twice(Stash, "w@0"), "is made a second time"),
        (twice(Free), "is used after it was freed"),
        (newest, r"reads version \d+ of w@0\.\d+, not \d+"),
    ],
)  # fmt: skip
def test_broken_lists_are_refused(change, match):
    with pytest.raises(ScheduleError, match=match):
        audit_lists(broken(change), calls=6)
