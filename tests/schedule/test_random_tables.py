"""Tables that nobody would draw: any placement of stages, any order that can run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import (
    Accumulate,
    Apply,
    Buffer,
    Fetch,
    Free,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
    Table,
    Task,
    Work,
    WorkerProgram,
    build,
    chain,
    check_table,
    get,
    instruction_text,
    marked_text,
    parse_table,
    to_text,
)
from autopar.simulate import equal_stages, run
from tests.schedule.flows import rich
from tests.schedule.reference import Terms, expected, interpret


def random_table(seed: int) -> Table:
    """Stages on random workers (some on two), tasks in a random order that respects what they need."""
    rng = random.Random(seed)
    workers, stages, microbatches = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 5)
    kinds = rng.choice([("forward",), ("forward", "backward"), ("forward", "backward", "weight")])
    homes = [rng.sample(range(workers), min(workers, rng.choice([1, 1, 1, 2]))) for _ in range(stages)]
    at = {(s, k): rng.choice(homes[s]) for s in range(stages) for k in range(microbatches)}
    empty = Table("random", stages, microbatches, ())
    unauthenticated = [Task(kind, s, k) for kind in kinds for s in range(stages) for k in range(microbatches)]
    rows: list[list[Task]] = [[] for _ in range(workers)]
    done: set[Task] = set()
    while unauthenticated:
        able = [t for t in unauthenticated if all(n in done for n in empty.needs(t))]
        task = rng.choice(able)
        unauthenticated.remove(task)
        done.add(task)
        rows[at[task.stage, task.microbatch]].append(task)
    return Table("random", stages, microbatches, tuple(tuple(row) for row in rows if row))


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_any_table_that_can_run_is_carried_out(seed):
    table = check_table(random_table(seed))
    assert parse_table(to_text(table)) == table
    program = build(table, rich(table), depth=1)
    terms = Terms()
    assert interpret(program, terms, seed) == expected(program, terms)
    dataflow = chain(table)
    timeline = run(build(table, dataflow), equal_stages(table, dataflow, dict.fromkeys(table.kinds, 1)))
    assert timeline.step_time >= max(map(len, table.rows))


def test_every_instruction_is_read_back():
    a, b = Buffer("a", 1), Buffer("b", -1, 2)
    instructions = (
        Run(Work("forward", 0), 1, (a,), (b,), (a,)),
        Run(Work("before", 0, 2), -1, (), ()),
        Apply(Work("update", 3, 1), (a,), (b,), ()),
        Accumulate(b, a, "concatenate", True, True),
        Send(a, 1, 7),
        Recv(b, 0, 7),
        Free((a, b)),
        Offload(a),
        Fetch(a),
        Stash(a, b),
    )
    table = get("1f1b").table(1, 1)
    program = Program(table, chain(table), (WorkerProgram(0, instructions),))
    text = program.to_json()
    assert Program.from_json(text) == program
    assert Program.from_json(text).to_json() == text
    lines = [instruction_text(i) for i in instructions]
    names = ["RUN", "RUN", "APPLY", "ACCUMULATE", "SEND", "RECV", "FREE", "OFFLOAD", "FETCH", "STASH"]
    assert [line.split()[0] for line in lines] == names
    assert all(f"  {line}\n" in str(program) for line in lines)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"table": 1}', "x"])
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ScheduleError, match="not a program of instructions"):
        Program.from_json(text)


def test_errors_of_large_tables_show_what_is_around_the_cell():
    table = get("1f1b").table(40, 100)
    rows = list(table.rows)
    rows[30] = (*rows[30], Task("forward", 30, 50))
    with pytest.raises(ScheduleError, match="occurs twice") as caught:
        check_table(Table("mine", 40, 100, tuple(rows)))
    shown = caught.value.table
    assert ">F30.50<" in shown
    assert len(shown) < 8000
    assert "workers 22 to 37 of 40, columns" in shown
    small = get("1f1b").table(2, 2)
    assert marked_text(small, None) == to_text(small)
    assert marked_text(small, Task("backward", 0, 1)).splitlines()[1] == "0 | F0.0 F0.1 .    B0.0 .    >B0.1<"
