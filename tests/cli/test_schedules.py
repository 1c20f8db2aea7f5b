"""``autopar schedules``: the list, one schedule, a table of a person's own."""

from __future__ import annotations

import json

import pytest

from autopar.schedule import get, parse_table, schedules


def test_the_list(run):
    done = run("schedules")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in schedules())
    listed = json.loads(run("schedules", "--format", "json").stdout)
    assert [entry["name"] for entry in listed] == list(schedules())
    assert all(entry["description"] for entry in listed)


def test_one_schedule(run, tmp_path):
    done = run("schedules", "1f1b", "--stages", "2", "--microbatches", "3", "-o", str(tmp_path / "trace.json"))
    assert done.exit_code == 0
    assert done.stdout.startswith("schedule 1f1b, 2 stages, 3 microbatches\n0 | F0.0 F0.1 ")
    assert "step 12 s, bubble 25.0%" in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    # The last microbatch: forward of worker 0 ends at 9 (after a backward that waited until 6), then 1 + 3 + 1 + 2.
    assert "step 16 s" in run("schedules", "1f1b", "--stages", "2", "--microbatches", "3", "--transfer", "1").stdout


@pytest.mark.parametrize("form", ["text", "csv", "json"])
def test_what_is_printed_loads_again(run, tmp_path, form):
    printed = run("schedules", "zb-v", "--stages", "4", "--microbatches", "3", "--format", form).stdout
    if form == "text":
        printed = printed.partition("\n\n")[0]
    assert parse_table(printed) == get("zb-v").table(4, 3)
    path = tmp_path / "mine"
    path.write_text(printed, encoding="utf-8")
    again = run("schedules", str(path))
    assert again.exit_code == 0
    assert "bubble" in again.stdout


def test_mistakes(run, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("0 | F0.0 B0.0\n1 | B1.0 F1.0\n", encoding="utf-8")
    done = run("schedules", str(path))
    assert done.exit_code == 1
    assert "ScheduleError: schedule table never ends" in done.stderr
    assert ">B0.0<" in done.stderr
    done = run("schedules", "1f2b")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no schedule is called '1f2b'; did you mean '1f1b'? known:" in done.stderr
    assert run("schedules", "chimera", "--stages", "3").exit_code == 1
