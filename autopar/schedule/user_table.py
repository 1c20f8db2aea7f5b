"""A schedule that a user writes as a table."""

from __future__ import annotations

from typing import final

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule
from autopar.schedule.check import check_table
from autopar.schedule.forms import parse_table
from autopar.schedule.table import Table


@final
class UserTable(Schedule):
    """The schedule that a text says, for its own numbers of stages and microbatches alone.

    Args:
        text: the table as text, CSV or JSON; see `autopar.schedule.parse_table`.

    Raises:
        ScheduleError: the text is no table, or the table cannot run; the cell is marked.
    """

    def __init__(self, text: str = "") -> None:
        if not text.strip():
            raise ScheduleError(
                'the schedule "table" has no table',
                remedy='pass its text, CSV or JSON, as autopar.schedule.get("table", text=...)',
            )
        self._table = check_table(parse_table(text))

    @property
    def name(self) -> str:
        """Name of the schedule: ``table``."""
        return "table"

    @property
    def chunks(self) -> int:
        """The most stages that a worker has; 1 where each stage has its own workers."""
        table = self._table
        return -(-table.num_stages // table.num_workers)

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table. ScheduleError where it was written for other numbers."""
        table = self._table
        if (num_stages, num_microbatches) != (table.num_stages, table.num_microbatches):
            raise ScheduleError(
                f"the table {table.name!r} is for {table.num_stages} stages and {table.num_microbatches} microbatches, "
                f"not for {num_stages} and {num_microbatches}",
                remedy=f"use num_stages={table.num_stages} and num_microbatches={table.num_microbatches}, or write "
                "another table",
            )
        return table
