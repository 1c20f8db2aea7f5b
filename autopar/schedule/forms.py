"""Tables as text, CSV and JSON. All three load again to the same table."""

from __future__ import annotations

import csv
import io
import re

import msgspec

from autopar.errors import ScheduleError
from autopar.schedule.table import Table, Task, grid, table_text

_HEAD = re.compile(r"schedule (?P<name>\S.*?), (?P<stages>\d+) stages, (?P<microbatches>\d+) microbatches")
_IDLE = ("", ".", "-")


class _TableDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schedule: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[str, ...], ...]


def to_text(table: Table) -> str:
    """The table as text: a head line, then a line a worker and a column a unit of time."""
    return table_text(table)


def to_csv(table: Table) -> str:
    """The table for a spreadsheet: a head line, then a row a worker and a column a unit of time."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["schedule", table.name, "stages", table.num_stages, "microbatches", table.num_microbatches])
    for worker, line in enumerate(grid(table)):
        writer.writerow([f"worker {worker}", *("" if cell is None else str(cell) for cell in line)])
    return out.getvalue()


def to_json(table: Table) -> str:
    """The table as JSON: ``{"schedule", "num_stages", "num_microbatches", "rows": [["F0.0", ...], ...]}``."""
    rows = tuple(tuple(map(str, row)) for row in table.rows)
    raw = msgspec.json.encode(_TableDocument(table.name, table.num_stages, table.num_microbatches, rows))
    return raw.decode() + "\n"


def parse_table(text: str) -> Table:
    """The table that `to_text`, `to_csv` or `to_json` wrote, or that a user did.

    A text may leave the head line out: then the name is "table", and the largest stage and microbatch give the numbers.
    Lines are ``0 | F0.0 F0.1 B0.0``: forward (F), backward (B) or weight (W), stage, microbatch. ``.`` and ``-`` are
    idle cells, ``#`` starts a comment. Whether the table can run is for `check_table`.

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
            f"the JSON is no schedule table: {error}",
            remedy="it has schedule, num_stages, num_microbatches and rows of cells as F0.0",
        ) from error
    rows = tuple(_cells(list(row), f"row {w}") for w, row in enumerate(document.rows))
    return Table(document.schedule, document.num_stages, document.num_microbatches, rows)


def _from_csv(text: str) -> Table:
    lines = [line for line in csv.reader(io.StringIO(text.strip())) if any(cell.strip() for cell in line)]
    head = [cell.strip() for cell in lines[0] if cell.strip()]
    if len(head) != 6 or (head[2], head[4]) != ("stages", "microbatches") or not (head[3] + head[5]).isdecimal():
        raise ScheduleError(
            f"the head line of the CSV is {','.join(head)!r}", remedy="write schedule,NAME,stages,N,microbatches,N"
        )
    rows = tuple(_cells([cell.strip() for cell in line[1:]], f"row {w}") for w, line in enumerate(lines[1:]))
    return Table(head[1], int(head[3]), int(head[5]), rows)


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
        return Table(head["name"], int(head["stages"]), int(head["microbatches"]), tuple(rows))
    tasks = [t for row in rows for t in row]
    stages = max((t.stage for t in tasks), default=-1) + 1
    return Table("table", stages, max((t.microbatch for t in tasks), default=-1) + 1, tuple(rows))


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
