"""Whether a dataflow fits a table: names, lifetimes, a work for every task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.errors import ScheduleError
from autopar.schedule.barrier import check_barrier
from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec, work_of
from autopar.schedule.table import KINDS, Table


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
