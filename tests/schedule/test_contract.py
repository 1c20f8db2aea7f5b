"""What every schedule must do, whoever wrote it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import (
    Program,
    Table,
    build,
    chain,
    check_table,
    get,
    parse_table,
    schedules,
    to_csv,
    to_json,
    to_text,
    verify,
)

NAMES = [name for name in schedules() if name != "table"]


def make(name: str, workers: int, microbatches: int) -> Table | None:
    """The table, or None where the schedule says that there is none, and which numbers would do."""
    schedule = get(name)
    try:
        table = schedule.table(workers * schedule.chunks, microbatches)
    except ScheduleError as error:
        assert "use " in (error.remedy or "")
        with pytest.raises(ScheduleError, match=re.escape(str(error))):
            schedule.check(workers * schedule.chunks, microbatches)
        return None
    schedule.check(workers * schedule.chunks, microbatches)
    return table


@pytest.mark.few(10)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(workers=st.integers(1, 8), microbatches=st.integers(1, 16), norm=st.booleans(), depth=st.integers(1, 2))
def test_a_schedule_keeps_the_contract(name, workers, microbatches, norm, depth):
    table = make(name, workers, microbatches)
    if table is None:
        return
    assert table.name == name == get(name).name
    assert check_table(table) is table
    assert (table.num_stages, table.num_microbatches) == (workers * get(name).chunks, microbatches)
    assert table.num_workers == workers
    tasks = [t for row in table.rows for t in row]
    assert len(set(tasks)) == len(tasks) == len(table.kinds) * table.num_stages * microbatches
    for worker, row in enumerate(table.rows):
        assert all(table.worker_of(t) == worker for t in row)
        assert all(worker in table.workers_of_stage(s) for s in table.stages_of_worker(worker))
    program = build(table, chain(table, global_norm=norm, parameter_bytes=5), depth)
    assert get(name).table(workers * get(name).chunks, microbatches) == table
    assert build(table, chain(table, global_norm=norm, parameter_bytes=5), depth).to_json() == program.to_json()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(workers=st.integers(1, 5), microbatches=st.integers(1, 9))
def test_all_forms_load_again(name, workers, microbatches):
    table = make(name, workers, microbatches)
    if table is None:
        return
    for form in (to_text, to_csv, to_json):
        assert parse_table(form(table)) == table
        assert get("table", text=form(table)).table(table.num_stages, microbatches) == table
    program = build(table, chain(table))
    again = Program.from_json(program.to_json())
    assert again == program
    assert verify(again) == verify(program)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (4, 4), (4, 8), (3, 9)])
def test_activations_in_flight_are_the_peak_of_the_program(name, workers, microbatches):
    table = make(name, workers, microbatches)
    if table is None:
        return
    wanted = get(name).in_flight(table.num_stages, microbatches) if "backward" in table.kinds else (0,) * workers
    assert verify(build(table, chain(table))).peak_bytes == wanted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-2, 3)])
def test_impossible_numbers_are_refused(name, stages, microbatches):
    with pytest.raises(ScheduleError, match="at least one of each"):
        get(name).table(stages, microbatches)
