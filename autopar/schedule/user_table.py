"""Schedules that users write as tables, and tables as text, CSV and JSON.

`to_text`, `to_csv` and `to_json` write a table, and `parse_table` reads all three back to the same table. `UserTable`
is the schedule of such a text.
"""

from __future__ import annotations

import csv
import io
import re
from typing import final

import msgspec

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule
from autopar.schedule.check import check_table
from autopar.schedule.table import Table, Task, after_text, grid, table_text

_HEAD = re.compile(
    r"schedule (?P<name>\S.*?), (?P<stages>\d+) stages, (?P<microbatches>\d+) microbatches"
    r"(, (?P<slices>\d+) slices)?(, after (?P<after>.*))?"
)
_IDLE = ("", ".", "-")


class _TableDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    schedule: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[str, ...], ...]
    after: tuple[tuple[int, ...], ...] = ()
    num_slices: int = 1


def to_text(table: Table) -> str:
    """The table as text: a head line, then a line a worker and a column a unit of time."""
    return table_text(table)


def to_csv(table: Table) -> str:
    """The table for a spreadsheet: a head line, then a row a worker and a column a unit of time."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    slices = ["slices", table.num_slices] if table.num_slices > 1 else []
    after = ["after", after_text(table)] if table.after else []
    counts = ["stages", table.num_stages, "microbatches", table.num_microbatches]
    writer.writerow(["schedule", table.name, *counts, *slices, *after])
    for worker, line in enumerate(grid(table)):
        writer.writerow([f"worker {worker}", *("" if cell is None else str(cell) for cell in line)])
    return out.getvalue()


def to_json(table: Table) -> str:
    """The table as JSON: ``{"schedule", "num_stages", "num_microbatches", "rows": [["F0.0", ...], ...]}``."""
    rows = tuple(tuple(map(str, row)) for row in table.rows)
    counts = (table.num_stages, table.num_microbatches)
    raw = msgspec.json.encode(_TableDocument(table.name, *counts, rows, table.after, table.num_slices))
    return raw.decode() + "\n"


def parse_table(text: str) -> Table:
    """The table that `to_text`, `to_csv` or `to_json` wrote, or that a user did.

    A text may leave the head line out: then the name is "table", and the largest stage and microbatch give the numbers.
    Lines are ``0 | F0.0 F0.1 B0.0``: forward (F), backward (B) or weight (W), stage, microbatch. ``.`` and ``-`` are
    idle cells, ``F0.3/1`` is of slice 1, ``#`` starts a comment. Whether the table can run is for `check_table`.

    Raises:
        ScheduleError: the text is none of these; the message says line and cell.
    """
    start = text.lstrip()[:9]
    if start.startswith("{"):
        return _from_json(text)
    return _from_csv(text) if start == "schedule," else _from_text(text)


def _from_json(text: str) -> Table:
    try:
        document = msgspec.json.decode(text, type=_TableDocument)
    except msgspec.DecodeError as error:
        raise ScheduleError(
            f"the JSON is not a schedule table: {error}",
            remedy="it has schedule, num_stages, num_microbatches and rows of cells as F0.0",
        ) from error
    rows = tuple(_cells(list(row), f"row {w}") for w, row in enumerate(document.rows))
    counts = (document.num_stages, document.num_microbatches)
    return Table(document.schedule, *counts, rows, document.after, document.num_slices)


def _from_csv(text: str) -> Table:
    lines = [line for line in csv.reader(io.StringIO(text.strip())) if any(cell.strip() for cell in line)]
    head = [cell.strip() for cell in lines[0] if cell.strip()]
    names = tuple(head[2::2])
    first, more = names[:2], names[2:]
    known = first == ("stages", "microbatches") and more in ((), ("slices",), ("after",), ("slices", "after"))
    further = dict(zip(more, head[7::2], strict=False))
    if len(head) % 2 or not known or not (head[3] + head[5] + further.get("slices", "1")).isdecimal():
        raise ScheduleError(
            f"the head line of the CSV is {','.join(head)!r}", remedy="write schedule,NAME,stages,N,microbatches,N"
        )
    rows = tuple(_cells([cell.strip() for cell in line[1:]], f"row {w}") for w, line in enumerate(lines[1:]))
    after = _after(further["after"]) if "after" in further else ()
    return Table(head[1], int(head[3]), int(head[5]), rows, after, int(further.get("slices", 1)))


def _from_text(text: str) -> Table:
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    rows = []
    for number, line in enumerate(lines[1:] if head else lines):
        worker, bar, cells = line.partition("|")
        if not bar or worker.strip() != str(number):
            raise ScheduleError(
                f"line {line!r} of the schedule table is not that of worker {number}",
                remedy=f"write it as {number} | F0.0 B0.0, workers in order from 0",
            )
        rows.append(_cells(cells.split(), f"worker {number}"))
    if head:
        after = _after(head["after"]) if head["after"] is not None else ()
        counts = (int(head["stages"]), int(head["microbatches"]))
        return Table(head["name"], *counts, tuple(rows), after, int(head["slices"] or 1))
    tasks = [t for row in rows for t in row]
    stages = max((t.stage for t in tasks), default=-1) + 1
    slices = max((t.slice for t in tasks), default=0) + 1
    return Table("table", stages, max((t.microbatch for t in tasks), default=-1) + 1, tuple(rows), num_slices=slices)


def _after(text: str) -> tuple[tuple[int, ...], ...]:
    """The stages that each stage waits for, from ``- | - | 0 1``."""
    stages = [part.split() for part in text.split("|")]
    if any(not (part == ["-"] or (part and all(n.isascii() and n.isdecimal() for n in part))) for part in stages):
        raise ScheduleError(
            f"after {text!r} of the schedule table does not say what each stage waits for",
            remedy="write the stages that each waits for, or -, as - | - | 0 1",
        )
    return tuple(() if part == ["-"] else tuple(map(int, part)) for part in stages)


def _cells(cells: list[str], place: str) -> tuple[Task, ...]:
    tasks = []
    for position, cell in enumerate(cells):
        if cell in _IDLE:
            continue
        task = Task.parse(cell)
        if task is None:
            raise ScheduleError(
                f"cell {position} of {place} of the schedule table is {cell!r}",
                remedy="write F, B or W, the stage, a dot and the microbatch, as F0.3; . where the worker waits",
            )
        tasks.append(task)
    return tuple(tasks)


@final
class UserTable(Schedule):
    """The schedule that a text says, for its own numbers of stages and microbatches alone.

    Args:
        text: the table as text, CSV or JSON; see `autopar.schedule.parse_table`.

    Raises:
        ScheduleError: the text is no table, or the table cannot run; the cell is marked.
    """

    name = "table"

    def __init__(self, text: str = "") -> None:
        if not text.strip():
            raise ScheduleError(
                'the schedule "table" has no table',
                remedy='pass its text, CSV or JSON, as autopar.schedule.get("table", text=...)',
            )
        self._table = check_table(parse_table(text))

    @property
    def chunks(self) -> int:
        """The most stages that a worker has; 1 where each stage has its own workers."""
        table = self._table
        return -(-table.num_stages // table.num_workers)

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Raises ScheduleError where the table was written for other numbers."""
        table = self._table
        if (num_stages, num_microbatches) != (table.num_stages, table.num_microbatches):
            raise ScheduleError(
                f"the table {table.name!r} is for {table.num_stages} stages and {table.num_microbatches} microbatches, "
                f"not for {num_stages} and {num_microbatches}",
                remedy=f"use num_stages={table.num_stages} and num_microbatches={table.num_microbatches}, or write "
                "another table",
            )

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table. ScheduleError where it was written for other numbers."""
        self.check(num_stages, num_microbatches)
        return self._table
