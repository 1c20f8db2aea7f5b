"""Whether a table can run: every task once, on one worker, after what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from autopar.errors import ScheduleError
from autopar.schedule.table import KINDS, Kind, Table, Task, marked_text


def check_table(table: Table) -> Table:
    """``table`` itself, if it can run.

    Raises:
        ScheduleError: a task is missing, doubled or out of range, a microbatch changes the worker inside a stage, or
            workers wait for each other. The table is shown with the cell marked.
    """
    if table.num_stages < 1 or table.num_microbatches < 1 or not table.rows:
        raise ScheduleError(
            f"schedule {table.name} has {table.num_stages} stages, {table.num_microbatches} microbatches and "
            f"{len(table.rows)} workers",
            remedy="use at least one of each",
        )
    if table.after and len(table.after) != table.num_stages:
        raise ScheduleError(
            f"schedule {table.name} says of {len(table.after)} stages what they wait for, and has {table.num_stages}",
            remedy="say it of every stage, - where it waits for none",
        )
    check_after(table.name, table.after)
    _check_range_and_doubles(table)
    _check_complete(table)
    _check_one_worker(table)
    _check_order(table)
    return table


def check_after(name: str, after: Sequence[Sequence[int]]) -> None:
    """Raises ScheduleError unless stages that are a graph are numbered so that each waits for earlier ones alone.

    Args:
        name: of the schedule.
        after: by stage the stages that it waits for.
    """
    for stage, earlier in enumerate(after):
        if list(earlier) != sorted(set(earlier)) or any(not 0 <= s < stage for s in earlier):
            raise ScheduleError(
                f"schedule {name}: stage {stage} waits for {' '.join(map(str, earlier))}",
                cause="a stage waits for different earlier stages, in order",
                remedy="number stages so that values of the forward pass go from lower to higher ones",
            )


def _check_range_and_doubles(table: Table) -> None:
    seen: dict[Task, int] = {}
    for worker, row in enumerate(table.rows):
        for position, task in enumerate(row):
            known = 0 <= task.stage < table.num_stages and 0 <= task.slice < table.num_slices
            if not (known and 0 <= task.microbatch < table.num_microbatches):
                raise ScheduleError(
                    f"schedule {table.name}: {task} of worker {worker} is out of range",
                    cause=f"there are {table.num_stages} stages and {table.num_microbatches} microbatches"
                    + (f" of {table.num_slices} slices" if table.num_slices > 1 else "")
                    + ", from 0",
                    table=marked_text(table, (worker, position)),
                )
            if task in seen:
                raise ScheduleError(
                    f"schedule {table.name}: {task} occurs twice, on workers {seen[task]} and {worker}",
                    remedy="leave one of the two out",
                    table=marked_text(table, (worker, position)),
                )
            seen[task] = worker


def expected_kinds(table: Table) -> tuple[Kind, ...]:
    """The kinds that every stage and microbatch must have: a kind that occurs once must occur everywhere."""
    return KINDS if "weight" in table.kinds else KINDS[:2] if "backward" in table.kinds else KINDS[:1]


def _check_complete(table: Table) -> None:
    present = {t for row in table.rows for t in row}
    numbers = product(range(table.num_stages), range(table.num_microbatches), range(table.num_slices))
    for (stage, microbatch, slice_), kind in ((n, k) for n in numbers for k in expected_kinds(table)):
        task = Task(kind, stage, microbatch, slice_)
        if task in present:
            continue
        others = [Task(k, stage, microbatch, slice_) for k in KINDS]
        raise ScheduleError(
            f"schedule {table.name}: {task} is missing: no worker does the {kind} of stage {stage} for "
            f"microbatch {microbatch}" + (f", slice {slice_}" if table.num_slices > 1 else ""),
            remedy=f"add {task} to the row of the worker of stage {stage}",
            table=marked_text(table, next((t for t in others if t in present), None)),
        )


def _check_one_worker(table: Table) -> None:
    kinds = expected_kinds(table)
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            worker_of_forward = table.worker_of(Task("forward", stage, microbatch))
            slices = range(table.num_slices)
            tasks = [Task(kind, stage, microbatch, k) for kind in kinds for k in slices]
            for task in tasks[1:]:
                if table.worker_of(task) != worker_of_forward:
                    raise ScheduleError(
                        f"schedule {table.name}: {task} is on worker {table.worker_of(task)}, but its forward is on "
                        f"worker {worker_of_forward}",
                        cause="what forward keeps for backward lies on the worker of forward",
                        remedy=f"put both on worker {worker_of_forward}",
                        table=marked_text(table, task),
                    )


def _check_order(table: Table) -> None:
    starts = table.unit_starts
    stuck = [(w, next((t for t in row if t not in starts), None)) for w, row in enumerate(table.rows)]
    blocked = [(w, t) for w, t in stuck if t is not None]
    if not blocked:
        return
    lines = []
    for worker, task in blocked:
        missing = [n for n in table.needs(task) if n not in starts]
        lines.append(f"worker {worker} at {task} waits for {', '.join(map(str, missing))}")
    # The first in the order of the model: the others mostly wait because of it.
    worker, task = blocked[0]
    raise ScheduleError(
        f"schedule {table.name} never ends: {'; '.join(lines)}",
        cause="a row has a task before one that it needs, directly or by way of other workers",
        remedy=f"move {task} of worker {worker} behind what it waits for",
        table=marked_text(table, task),
    )
