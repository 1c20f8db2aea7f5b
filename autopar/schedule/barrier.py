"""Tables with a moment at which all forward passes are done and no backward pass has begun: where examples meet."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.schedule.table import Table, Task, marked_text


def check_barrier(table: Table) -> None:
    """Raises ScheduleError unless every worker ends its forward passes before its other tasks; it names the first task
    that is too early.

    Args:
        table: a table that `autopar.schedule.check_table` accepts.
    """
    early = _backward_before_forward(table)
    if early is None:
        return
    raise ScheduleError(
        f"schedule {table.name} runs {early} before the last forward pass, and examples meet between the forward and "
        "the backward passes of all microbatches",
        cause="a contrastive loss, or experts balanced over the global batch, needs all microbatches before any "
        "backward pass",
        remedy='schedule="gpipe", a table of your own with all forwards first, or num_stages=1',
        table=marked_text(table, early),
    )


def _backward_before_forward(table: Table) -> Task | None:
    """The first task of a worker that is no forward pass and has one behind it."""
    for row in table.rows:
        last = max((n for n, task in enumerate(row) if task.kind == "forward"), default=-1)
        early = next((task for task in row[:last] if task.kind != "forward"), None)
        if early is not None:
            return early
    return None
