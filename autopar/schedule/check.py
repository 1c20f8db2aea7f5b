"""Whether a table can run, and whether a dataflow fits it.

`check_table`: every task once, on one worker, after what it needs. `check_dataflow`: names, lifetimes, a work for
every task. `check_barrier`: there is a moment at which all forward passes are done and no backward pass has begun. The
lists of instructions are checked in `autopar.schedule.verify`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from autopar.errors import ScheduleError
from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec, work_of
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
        remedy=f"move {task} of worker {worker} after what it waits for",
        table=marked_text(table, task),
    )


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
    """The first task of a worker that is no forward pass and has one after it."""
    for row in table.rows:
        last = max((n for n, task in enumerate(row) if task.kind == "forward"), default=-1)
        early = next((task for task in row[:last] if task.kind != "forward"), None)
        if early is not None:
            return early
    return None


def check_dataflow(table: Table, dataflow: Dataflow) -> None:
    """Raises ScheduleError, with all that is wrong, unless ``dataflow`` can run by ``table``.

    Args:
        table: a table that `check_table` accepts.
        dataflow: what its works read and write.
    """
    if dataflow.meets:
        check_barrier(table)
    wrong = [*_names(dataflow), *_works(table, dataflow)]
    if not wrong:
        wrong = [
            *(text for v in dataflow.values for text in _value(table, dataflow, v)),
            *(text for s in dataflow.works for text in _reads(dataflow, s)),
        ]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ScheduleError(
            f"the dataflow does not fit schedule {table.name}: " + "; ".join(wrong[:5]) + more,
            cause="the works were made for another schedule or are not complete",
        )


def _names(dataflow: Dataflow) -> Iterator[str]:
    for name, count in sorted(Counter(v.name for v in dataflow.values).items()):
        if count > 1:
            yield f"value {name} is there {count} times"
    for work, count in sorted(Counter(s.work for s in dataflow.works).items()):
        if count > 1:
            yield f"work {work} is there {count} times"
    # Slices of one pass add to the same accumulators.
    passes = {(n, s.work.kind, s.work.stage) for s in dataflow.works if s.work.kind in KINDS for n in s.accumulates}
    written = Counter(n for s in dataflow.works for n in s.writes) + Counter(n for n, _, _ in passes)
    written += Counter(n for s in dataflow.works if s.work.kind not in KINDS for n in s.accumulates)
    for name, count in sorted(written.items()):
        if count > 1:
            yield f"{name} is written by {count} works"
    known = {v.name for v in dataflow.values}
    for spec in dataflow.works:
        for name in (*spec.reads, *spec.writes, *spec.accumulates):
            if name not in known:
                yield f"work {spec.work} names {name}, which is no value"


def _works(table: Table, dataflow: Dataflow) -> Iterator[str]:
    wanted = {work_of(t) for row in table.rows for t in row}
    there = {s.work for s in dataflow.works}
    for work in sorted(wanted - there):
        yield f"there is no work {work}"
    for work in sorted(there - wanted):
        if work.kind in KINDS:
            yield f"no task runs work {work}"
        elif not table.workers_of_stage(work.stage):
            yield f"work {work} is of a stage that no worker has"
    for stage in range(table.num_stages):
        if len(table.workers_of_stage(stage)) > 2:
            yield f"stage {stage} is on {len(table.workers_of_stage(stage))} workers; at most two can share one"


def _value(table: Table, dataflow: Dataflow, value: ValueSpec) -> Iterator[str]:
    writer = dataflow.writers.get(value.name)
    accumulated = any(value.name in s.accumulates for s in dataflow.works)
    if value.is_input == (writer is not None):
        yield f"{value.name} is " + ("an input and written" if writer else "no input and never written")
        return
    if (value.lifetime == "accumulator") != accumulated or (value.reduce is not None) != accumulated:
        yield f"{value.name} must be accumulated, have lifetime accumulator and a reduce, or none of these"
    if value.is_input and (value.result or not all(table.workers_of_stage(s) for s in value.stages)):
        yield f"input {value.name} is a result or lies on a stage that no worker has"
    if value.donated and not value.is_input:
        yield f"{value.name} is donated and no input"
    if value.result and value.lifetime == "microbatch":
        yield f"{value.name} has a buffer a microbatch and is a result; accumulate it"
    if writer is not None:
        in_loop = writer.kind in KINDS
        if in_loop != (value.lifetime in ("microbatch", "accumulator")):
            yield f"{value.name} has lifetime {value.lifetime} and is written by {writer}"
    if accumulated and not value.result and value.name not in dataflow.readers:
        yield f"accumulator {value.name} is neither read nor a result"


def _reads(dataflow: Dataflow, spec: WorkSpec) -> Iterator[str]:
    for name in spec.reads:
        value, writer = dataflow.by_name[name], dataflow.writers.get(name)
        if not _may_read(spec.work, value, writer):
            yield f"work {spec.work} reads {name} ({value.lifetime}, written by {writer or 'nobody'})"
    for read, write in spec.aliases:
        if read not in spec.reads or write not in (*spec.writes, *spec.accumulates):
            yield f"work {spec.work} aliases {read} and {write}, which it does not read and write"


def _may_read(work: Work, value: ValueSpec, writer: Work | None) -> bool:
    if work.kind in KINDS:
        if value.lifetime == "step" and writer is not None and writer.kind == "meeting":
            return work.kind != "forward"
        return value.lifetime == "microbatch" or (
            value.lifetime == "step" and (writer is None or writer.kind == "before")
        )
    if value.lifetime == "microbatch":
        return False
    if writer is not None and writer.kind == work.kind:
        return writer.part < work.part
    if work.kind == "meeting":
        return writer is None or writer.kind in ("before", "forward")
    return work.kind == "update" or writer is None
