"""`with_slices`: a schedule whose microbatches pass in slices of tokens.

From TeraPipe (Li et al., ICML'21): a stage passes on a slice of a sequence before it takes the next. Slices are a
second index of microbatches: every pass becomes one a slice, forward from the first to the last, backward from the last
to the first, as later slices owe gradients of keys and values to earlier ones. A stage that waited for a microbatch
waits for a slice, so that a pipeline fills and drains as much faster as there are slices. GPipe with one microbatch is
TeraPipe's schedule.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedule.table import Table, Task

#: Schedules whose updates follow single microbatches, and those of one pass alone.
WITHOUT_SLICES = ("ampnet", "branches", "inference", "pipedream", "pipedream-vertical", "2bw")
_WITH = "gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-h2, zb-v, chimera and tables"


def with_slices(table: Table, count: int) -> Table:
    """``table`` with every pass in ``count`` slices.

    Args:
        table: a schedule of whole microbatches.
        count: slices of each microbatch.

    Raises:
        ScheduleError: the schedule takes no slices; the message lists those that do. Or ``count`` is no count, or the
            table has slices.
    """
    check_takes_slices(table.name)
    if count < 1 or table.num_slices != 1:
        raise ScheduleError(
            f"schedule {table.name} with {table.num_slices} slices was to be cut into {count}",
            remedy="one slice or more, of a table that has none",
        )
    rows = tuple(tuple(part for task in row for part in _parts(task, count)) for row in table.rows)
    return replace(table, rows=rows, num_slices=count)


def check_takes_slices(name: str) -> None:
    """Raises ScheduleError, which lists those that do, where a schedule of that name takes no slices."""
    if name in WITHOUT_SLICES:
        raise ScheduleError(
            f"schedule {name} takes no slices of tokens",
            cause="its updates follow single microbatches, or it has no backward pass",
            remedy=f"one of {_WITH}, or token_slices=None",
        )


def _parts(task: Task, count: int) -> tuple[Task, ...]:
    numbers = range(count) if task.kind == "forward" else reversed(range(count))
    return tuple(replace(task, slice=k) for k in numbers)
