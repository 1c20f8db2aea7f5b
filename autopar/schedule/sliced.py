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
from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec
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


def chain_of_slices(
    table: Table, *, activation_bytes: int = 1, boundary_bytes: int = 0, kept_bytes: int = 0
) -> Dataflow:
    """The dataflow of a plain chain of stages that pass slices on.

    Args:
        table: from `with_slices`.
        activation_bytes: what a slice leaves on a stage for its own backward pass.
        boundary_bytes: what goes to the next stage, and back as its gradient.
        kept_bytes: keys and values of a slice, which later slices and backward passes read, and their gradients.
    """
    last, slices = table.num_stages - 1, range(table.num_slices)
    works: list[WorkSpec] = []
    values = [ValueSpec("x", boundary_bytes, "microbatch", stages=(0,))]
    values.append(ValueSpec("loss", 0, "accumulator", reduce="sum", result=True))
    for s in range(table.num_stages):
        values.append(ValueSpec(f"w{s}", 0, "step", stages=(s,)))
        values.append(ValueSpec(f"g{s}", 0, "accumulator", reduce="sum", result=True))
        for k in slices:
            prefix = tuple(f"kv{s}#{j}" for j in slices[: k + 1])
            into = f"y{s - 1}#{k}" if s else "x"
            out = (f"y{s}#{k}",) if s < last else ()
            down = (f"d{s - 1}#{k}",) if s else ()
            up = (f"d{s}#{k}",) if s < last else ()
            owed = (f"owed{s}#{k}",) if k else ()
            owing = (f"owed{s}#{k + 1}",) if k < slices[-1] else ()
            sums = ("loss",) if s == last else ()
            forward = (f"w{s}", into, *prefix[:-1])
            works.append(WorkSpec(Work("forward", s, k), forward, (*out, f"k{s}#{k}", prefix[-1]), sums))
            backward = (f"w{s}", f"k{s}#{k}", *prefix, *up, *owing)
            if table.splits_backward:
                works.append(WorkSpec(Work("backward", s, k), backward, (*down, *owed, f"h{s}#{k}")))
                works.append(WorkSpec(Work("weight", s, k), (f"k{s}#{k}", f"h{s}#{k}"), (), (f"g{s}",)))
                values.append(ValueSpec(f"h{s}#{k}", 0, "microbatch"))
            else:
                works.append(WorkSpec(Work("backward", s, k), backward, (*down, *owed), (f"g{s}",)))
            values += [ValueSpec(n, boundary_bytes, "microbatch") for n in (*out, *down)]
            values.append(ValueSpec(f"k{s}#{k}", activation_bytes, "microbatch"))
            values += [ValueSpec(n, kept_bytes, "microbatch") for n in (prefix[-1], *owed)]
    return Dataflow(tuple(works), tuple(values))
