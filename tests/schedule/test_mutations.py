"""Spoiled programs and tables: each is refused, or computes the right results all the same."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from autopar.errors import ScheduleError
from autopar.schedule import (
    Accumulate,
    Apply,
    Buffer,
    Free,
    Program,
    Recv,
    Run,
    Send,
    Table,
    Task,
    WorkerProgram,
    build,
    chain,
    get,
    verify,
)
from tests.schedule.flows import rich
from tests.schedule.reference import Terms, Wrong, expected, interpret

CASES = [
    ("1f1b", 3, 3, rich),
    ("gpipe", 2, 3, rich),
    ("interleaved", 2, 2, rich),
    ("zb-h1", 2, 3, rich),
    ("zb-v", 2, 2, rich),
    ("chimera", 2, 3, rich),
    ("inference", 3, 2, rich),
    ("1f1b", 2, 2, chain),
]
PROGRAMS = 1000
TABLES = 200


def original(case):
    name, workers, microbatches, flow = CASES[case % len(CASES)]
    schedule = get(name)
    table = schedule.table(workers * schedule.chunks, microbatches)
    return build(table, flow(table))


def replace_worker(program, worker, lines):
    workers = list(program.workers)
    workers[worker] = WorkerProgram(worker, tuple(lines))
    return msgspec.structs.replace(program, workers=tuple(workers))


def swap(rng, program, worker, lines):
    a, b = rng.sample(range(len(lines)), 2)
    lines[a], lines[b] = lines[b], lines[a]


def swap_neighbours(rng, program, worker, lines):
    a = rng.randrange(len(lines) - 1)
    lines[a], lines[a + 1] = lines[a + 1], lines[a]


def drop(rng, program, worker, lines):
    del lines[rng.randrange(len(lines))]


def duplicate(rng, program, worker, lines):
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))


def move(rng, program, worker, lines):
    lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))


def import_from_elsewhere(rng, program, worker, lines):
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(rng.choice(program.workers).instructions))


def other_buffer(rng, b, program):
    known = [v.name for v in program.dataflow.values]
    return rng.choice(
        [
            Buffer(b.value, rng.randrange(-1, program.table.num_microbatches), b.origin),
            Buffer(rng.choice(known), b.microbatch, b.origin),
            Buffer(b.value, b.microbatch, rng.randrange(-1, program.table.num_workers)),
        ]
    )


def change_field(rng, program, worker, lines):
    """Another tag, microbatch, worker, flag or buffer in one instruction."""
    a = rng.randrange(len(lines))
    i = lines[a]
    change = {}
    if isinstance(i, Send | Recv):
        place = "to" if isinstance(i, Send) else "source"
        change = rng.choice(
            [
                {"tag": rng.randrange(30)},
                {place: rng.randrange(program.table.num_workers)},
                {"value": other_buffer(rng, i.value, program)},
            ]
        )
    elif isinstance(i, Run | Apply):
        field = rng.choice(["reads", "writes", "donate", "microbatch" if isinstance(i, Run) else "reads"])
        if field == "microbatch":
            change = {"microbatch": rng.randrange(-1, program.table.num_microbatches + 1)}
        elif field == "donate":
            some = [b for b in i.reads if rng.random() < 0.5]
            change = {"donate": tuple(some)}
        else:
            names = list(getattr(i, field))
            if names:
                at = rng.randrange(len(names))
                names[at] = rng.choice([other_buffer(rng, names[at], program), rng.choice(names)])
            change = {field: tuple(names)}
    elif isinstance(i, Accumulate):
        change = rng.choice(
            [
                {"first": not i.first},
                {"donate": not i.donate},
                {"value": other_buffer(rng, i.value, program)},
                {"into": other_buffer(rng, i.into, program)},
                {"reduce": rng.choice(["sum", "max", "min", "concatenate"])},
            ]
        )
    elif isinstance(i, Free):
        change = {"values": (*i.values[1:], other_buffer(rng, i.values[0], program))}
    lines[a] = msgspec.structs.replace(i, **change)


def swap_same_kind(rng, program, worker, lines):
    """Two runs, or two sends, change places: what real mistakes in a schedule look like."""
    kind = rng.choice([Run, Send, Recv, Accumulate])
    places = [n for n, i in enumerate(lines) if isinstance(i, kind)]
    if len(places) > 1:
        a, b = rng.sample(places, 2)
        lines[a], lines[b] = lines[b], lines[a]


MUTATIONS = (
    swap,
    swap_neighbours,
    drop,
    duplicate,
    move,
    import_from_elsewhere,
    change_field,
    change_field,
    swap_same_kind,
)


@pytest.fixture(scope="module")
def outcome():
    """(refused, harmless) of all spoiled programs, and what was accepted and wrong."""
    refused = harmless = 0
    wrong = []
    originals = [original(c) for c in range(len(CASES))]
    terms = Terms()
    right = [expected(p, terms) for p in originals]
    for seed in range(PROGRAMS):
        rng = random.Random(seed)
        case = seed % len(CASES)
        program = originals[case]
        worker = rng.randrange(len(program.workers))
        lines = list(program.workers[worker].instructions)
        mutation = rng.choice(MUTATIONS)
        mutation(rng, program, worker, lines)
        spoiled = replace_worker(program, worker, lines)
        try:
            verify(spoiled, depth=1 + seed % 2)
        except ScheduleError as error:
            assert str(error).startswith(("schedule", "the program"))
            refused += 1
            continue
        try:
            found = interpret(spoiled, terms, seed)
        except Wrong as error:
            wrong.append((seed, mutation.__name__, str(error)))
            continue
        if found == right[case]:
            harmless += 1
        else:
            wrong.append((seed, mutation.__name__, "other results"))
    return refused, harmless, wrong


def test_every_spoiled_program_is_refused_or_harmless(outcome):
    refused, harmless, wrong = outcome
    assert wrong == []
    assert refused + harmless == PROGRAMS
    # Not vacuous: both happen often.
    assert refused > PROGRAMS / 2
    assert harmless > PROGRAMS / 20


@pytest.mark.parametrize("case", range(len(CASES)))
def test_programs_compute_what_one_machine_computes(case):
    program = original(case)
    terms = Terms()
    right = expected(program, terms)
    assert right
    for seed in range(3):
        assert interpret(program, terms, seed) == right


def spoil_table(rng, table):
    rows = [list(row) for row in table.rows]
    worker = rng.randrange(len(rows))
    row = rows[worker]
    place = rng.randrange(len(row))
    choice = rng.randrange(6)
    if choice == 0:
        other = rng.randrange(len(row))
        row[place], row[other] = row[other], row[place]
    elif choice == 1:
        del row[place]
    elif choice == 2:
        row.insert(rng.randrange(len(row) + 1), row[place])
    elif choice == 3:
        rows[rng.randrange(len(rows))].append(row.pop(place))
    elif choice == 4:
        row.insert(rng.randrange(len(row)), row.pop(place))
    else:
        t = row[place]
        row[place] = Task(
            rng.choice(["forward", "backward", "weight", t.kind]),
            t.stage + rng.choice([-1, 0, 0, 1]),
            t.microbatch + rng.choice([-1, 0, 1]),
        )
    return Table(table.name, table.num_stages, table.num_microbatches, tuple(map(tuple, rows)))


def test_every_spoiled_table_is_refused_or_harmless():
    refused = harmless = 0
    for seed in range(TABLES):
        rng = random.Random(seed)
        table = spoil_table(rng, original(seed).table)
        try:
            program = build(table, rich(table), depth=1)
        except ScheduleError as error:
            assert error.table is not None or "dataflow" in error.fact
            refused += 1
            continue
        terms = Terms()
        assert interpret(program, terms, seed) == expected(program, terms)
        harmless += 1
    assert refused + harmless == TABLES
    assert min(refused, harmless) > TABLES / 20


def test_the_reference_is_not_the_verifier():
    """A program that mixes up microbatches is wrong in the interpreter too."""
    program = original(0)
    lines = list(program.workers[0].instructions)
    at = [n for n, i in enumerate(lines) if isinstance(i, Run) and i.work.kind == "forward"]
    first, second = lines[at[0]], lines[at[1]]
    lines[at[0]] = msgspec.structs.replace(first, writes=second.writes)
    lines[at[1]] = msgspec.structs.replace(second, writes=first.writes)
    spoiled: Program = replace_worker(program, 0, lines)
    terms = Terms()
    with contextlib.suppress(Wrong):
        assert interpret(spoiled, terms) != expected(program, terms)
    with pytest.raises(ScheduleError):
        verify(spoiled)
