"""OFFLOAD and FETCH around what microbatches wait with: lists stay right, and hold less."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.schedule import Dataflow, Fetch, Free, Offload, Run, build, chain, get, usage, verify
from tests.schedule.flows import rich


def on_host(flow: Dataflow, prefix: str) -> Dataflow:
    """The dataflow with what ``forward`` keeps for ``backward`` in host memory."""
    values = tuple(dataclasses.replace(v, host=v.name.startswith(prefix)) for v in flow.values)
    return dataclasses.replace(flow, values=values)


def moves(program):
    return [[i for i in w.instructions if isinstance(i, Offload | Fetch)] for w in program.workers]


def peaks(program):
    return [max(u.during_bytes for u in line) for line in usage(program)]


def most_on_device(program, worker, name):
    """Most buffers of a value that are on the device while a program runs, its own results with them."""
    there, most = set(), 0
    for i in program.workers[worker].instructions:
        if isinstance(i, Run):
            there |= {b for b in i.writes if b.value == name}
            most = max(most, len(there))
        gone = i.donate if isinstance(i, Run) else i.values if isinstance(i, Free) else ()
        there -= set(gone) | ({i.value} if isinstance(i, Offload) else set())
        there |= {i.value} if isinstance(i, Fetch) else set()
    return most


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "chimera", "zb-v"])
def test_lists_of_all_schedules_stay_valid_and_hold_no_more(name):
    schedule = get(name)
    table = schedule.table(4 * schedule.chunks if name != "chimera" else 4, 8)
    flow = rich(table)
    plain, moved = build(table, flow), build(table, on_host(flow, "k"))
    verify(moved)
    assert sum(map(len, moves(moved))) > 0
    assert sum(map(len, moves(plain))) == 0
    for line in moves(moved):
        left = [i.value for i in line if isinstance(i, Offload)]
        assert sorted(left) == sorted(i.value for i in line if isinstance(i, Fetch))
    for w in moved.workers:
        away = {}
        for n, i in enumerate(w.instructions):
            if isinstance(i, Offload):
                away[i.value] = n
            elif isinstance(i, Fetch):
                between = w.instructions[away[i.value] : n]
                assert any(isinstance(j, Run) for j in between), "it leaves the device for nothing"
    assert all(a <= b for a, b in zip(peaks(moved), peaks(plain), strict=True))
    assert [i for w in moved.workers for i in w.instructions if not isinstance(i, Offload | Fetch)] == [
        i for w in plain.workers for i in w.instructions
    ]


def test_of_one_forward_one_backward_two_microbatches_stay_on_the_device():
    table = get("1f1b").table(6, 12)
    flow = rich(table)
    plain, moved = build(table, flow), build(table, on_host(flow, "k"))
    # Of six microbatches in flight on the first stage two are on the device while a program runs.
    assert most_on_device(plain, 0, "k0") == 6
    assert most_on_device(moved, 0, "k0") == 2
    assert not moves(moved)[5]  # a microbatch is used at once there


def test_it_comes_back_one_program_ahead_of_its_use():
    table = get("1f1b").table(4, 8)
    program = build(table, on_host(rich(table), "k"))
    lines = program.workers[0].instructions
    for number, i in enumerate(lines):
        if isinstance(i, Fetch):
            runs = [r for r in lines[number:] if isinstance(r, Run)]
            assert i.value not in runs[0].reads and i.value in runs[1].reads


def test_without_values_for_hosts_nothing_changes():
    table = get("1f1b").table(4, 8)
    assert build(table, on_host(chain(table), "no such")) == build(table, chain(table))
