"""Tables that people write: what is read, what is refused and how it is shown."""

from __future__ import annotations

import pytest

import autopar.schedule.registry as registry
from autopar.errors import ScheduleError
from autopar.schedule import Schedule, Table, Task, check_table, get, parse_table, register, schedules, to_csv

GOOD = """
# two workers, backward in reverse
0 | F0.0 F0.1 .    .    B0.1 B0.0
1 |      F1.0 F1.1 B1.1 B1.0          # the last stage
"""


def refused(text: str, match: str, cell: str | None = None) -> str:
    with pytest.raises(ScheduleError, match=match) as caught:
        get("table", text=text)
    shown = str(caught.value)
    if cell is not None:
        assert f">{cell}<" in shown
    return shown


def test_a_table_as_people_write_it():
    table = get("table", text=GOOD).table(2, 2)
    assert (table.name, table.num_stages, table.num_microbatches) == ("table", 2, 2)
    assert table.rows[1] == tuple(map(Task.parse, ("F1.0", "F1.1", "B1.1", "B1.0")))
    assert table.worker_of(Task("backward", 1, 0)) == 1
    assert get("table", text=GOOD).chunks == 1


def test_a_spreadsheet_as_people_save_it():
    text = to_csv(get("table", text=GOOD).table(2, 2)).replace("\n", "\r\n") + ",,,\r\n"
    assert parse_table(text) == get("table", text=GOOD).table(2, 2)


@pytest.mark.parametrize(
    ("text", "match", "cell"),
    [
        ("", "has no table", None),
        ("0 | F0.0 X0.1", "cell 1 of worker 0 of the schedule table is 'X0.1'", None),
        ("0 | F0.0 F0", "is 'F0'", None),
        ("0 | F0.-1", "is 'F0.-1'", None),
        ("1 | F0.0", "is not that of worker 0", None),
        ("F0.0 B0.0", "is not that of worker 0", None),
        ("0 | F0.0 B0.0 F0.0", "F0.0 occurs twice, on workers 0 and 0", "F0.0"),
        ("0 | F0.0 F0.1 B0.0", "B0.1 is missing", "F0.1"),
        ("0 | F0.0 F1.0 F1.1", "F0.1 is missing", None),
        ("0 | F0.0 B0.0\n1 | W0.0", "is on worker 1, but its forward is on worker 0", "W0.0"),
        ("0 | B0.0 F0.0", "never ends: worker 0 at B0.0 waits for F0.0", "B0.0"),
        ("0 | F0.0 B0.0\n1 | B1.0 F1.0", "worker 1 at B1.0 waits for F1.0", "B0.0"),
        ("schedule x, 1 stages, 1 microbatches\n0 | F0.0 F0.1", "F0.1 of worker 0 is out of range", "F0.1"),
        ("schedule x, 1 stages, 0 microbatches\n0 | F0.0", "0 microbatches", None),
        ("schedule,x,stages,1\nworker 0,F0.0", "the head line of the CSV", None),
        ("schedule,x,stages,1,microbatches,1\nworker 0,F0.0,Q", "cell 1 of row 0", None),
        ('{"schedule": "x"}', "the JSON is not a schedule table", None),
        (
            '{"schedule": 1, "num_stages": 1, "num_microbatches": 1, "rows": []}',
            "the JSON is not a schedule table",
            None,
        ),
        ('{"schedule": "x", "num_stages": 1, "num_microbatches": 1, "rows": [["F"]]}', "cell 0 of row 0", None),
        ('{"schedule": "x", "num_stages": 1, "num_microbatches": 1, "rows": []}', "0 workers", None),
    ],
)
def test_mistakes(text, match, cell):
    refused(text, match, cell)


def test_a_table_is_for_its_own_numbers():
    with pytest.raises(ScheduleError, match="for 2 stages and 2 microbatches, not for 2 and 4") as caught:
        get("table", text=GOOD).table(2, 4)
    assert "num_microbatches=2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "numbers", "match"),
    [
        ("interleaved", {}, (8, 6), "use 4 or 8 microbatches"),
        ("interleaved", {}, (8, 3), "use 4 microbatches"),
        ("interleaved", {"chunks": 3}, (8, 8), "use 6 or 9 stages"),
        ("zb-v", {}, (3, 4), "use 2 or 4 stages"),
        ("chimera", {}, (1, 4), "use 2 stages"),
        ("chimera", {}, (5, 4), "use 4 or 6 stages"),
    ],
)
def test_refusals_say_what_would_do(name, options, numbers, match):
    with pytest.raises(ScheduleError, match=match):
        get(name, **options).table(*numbers)


def test_names():
    assert list(schedules()) == sorted(schedules())
    assert {
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "interleaved",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "chimera",
        "inference",
        "table",
    } <= set(schedules())
    assert [get(n).name for n in ("ZB_H1", "zbv", "pipedream-flush", "DAPPLE")] == ["zb-h1", "zb-v", "1f1b", "1f1b"]
    with pytest.raises(ScheduleError, match="no schedule is called '1f2b'") as caught:
        get("1f2b")
    assert "1f1b" in str(caught.value)
    with pytest.raises(ScheduleError, match="does not take"):
        get("gpipe", chunks=2)
    with pytest.raises(ScheduleError, match="use at least 2"):
        get("interleaved", chunks=1)


def test_people_register_their_own(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", registry.built_in())

    @register("one-by-one")
    class OneByOne(Schedule):
        """A microbatch goes all the way before the next begins."""

        name = "one-by-one"

        def table(self, num_stages, num_microbatches):
            rows = tuple(
                tuple(Task(kind, s, k) for k in range(num_microbatches) for kind in ("forward", "backward"))
                for s in range(num_stages)
            )
            return Table(self.name, num_stages, num_microbatches, rows)

    assert "one-by-one" in schedules()
    assert isinstance(get("one-by-one"), OneByOne)
    assert get("one_by_one").in_flight(3, 4) == (1, 1, 1)
    check_table(get("one-by-one").table(3, 4))
