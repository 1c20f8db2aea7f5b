"""The dataflow of a plain chain or graph of stages: for pictures of schedules, estimates and tests."""

from __future__ import annotations

from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec
from autopar.schedule.table import Table


def chain(
    table: Table,
    *,
    activation_bytes: int = 1,
    boundary_bytes: int = 0,
    parameter_bytes: int = 0,
    global_norm: bool = False,
) -> Dataflow:
    """Stages that hand one value to the next ones, keep one for backward, and update one parameter each.

    Args:
        table: the schedule that it is for; decides the number of stages and the kinds of work.
        activation_bytes: what a stage keeps of a microbatch from forward to its last backward task.
        boundary_bytes: what goes to the next stages, and back from each as its gradient.
        parameter_bytes: parameter of a stage; its gradient is as large.
        global_norm: the update needs the sum of something over all stages.
    """
    last = table.num_stages - 1
    trains = "backward" in table.kinds
    works: list[WorkSpec] = []
    first = tuple(s for s in range(table.num_stages) if not table.stages_before(s))
    values = [
        ValueSpec("x", boundary_bytes, "microbatch", stages=first, donated=True),
        ValueSpec("loss", 0, "accumulator", reduce="sum" if trains else "concatenate", result=True),
    ]
    for s in range(table.num_stages):
        values.append(ValueSpec(f"w{s}", parameter_bytes, "step", stages=(s,), donated=trains))
        out = (f"y{s}",) if table.stages_behind(s) else ()
        kept = (f"k{s}",) if trains else ()
        values += [ValueSpec(n, boundary_bytes, "microbatch") for n in out]
        values += [ValueSpec(n, activation_bytes, "microbatch") for n in kept]
        reads = (f"w{s}", *([f"y{t}" for t in table.stages_before(s)] or ["x"]))
        works.append(WorkSpec(Work("forward", s), reads, (*out, *kept), ("loss",) if s == last else ()))
        if trains:
            _train(table, s, works, values, boundary_bytes, parameter_bytes, global_norm)
    return Dataflow(tuple(works), tuple(values))


def _train(
    table: Table,
    s: int,
    works: list[WorkSpec],
    values: list[ValueSpec],
    boundary_bytes: int,
    parameter_bytes: int,
    global_norm: bool,
) -> None:
    """Backward, weight gradient and update of stage ``s``."""
    reads = (f"w{s}", f"k{s}", *(_gradient(table, s, t) for t in table.stages_behind(s)))
    down = tuple(_gradient(table, t, s) for t in table.stages_before(s))
    values += [ValueSpec(n, boundary_bytes, "microbatch") for n in down]
    values.append(ValueSpec(f"g{s}", parameter_bytes, "accumulator", reduce="sum"))
    values.append(ValueSpec(f"new{s}", parameter_bytes, "step", result=True))
    if table.splits_backward:
        values.append(ValueSpec(f"h{s}", 0, "microbatch"))
        works.append(WorkSpec(Work("backward", s), reads, (*down, f"h{s}")))
        works.append(WorkSpec(Work("weight", s), (f"k{s}", f"h{s}"), (), (f"g{s}",)))
    else:
        works.append(WorkSpec(Work("backward", s), reads, down, (f"g{s}",)))
    norms: tuple[str, ...] = ()
    if global_norm:
        norms = tuple(f"norm{t}" for t in range(table.num_stages))
        values.append(ValueSpec(f"norm{s}", 0, "step"))
        works.append(WorkSpec(Work("update", s), (f"g{s}",), (f"norm{s}",)))
    works.append(
        WorkSpec(
            Work("update", s, int(global_norm)),
            (f"w{s}", f"g{s}", *norms),
            (f"new{s}",),
            aliases=((f"w{s}", f"new{s}"),),
        )
    )


def _gradient(table: Table, stage: int, source: int) -> str:
    """The gradient of what a stage hands on, from one of those that it is handed to."""
    return f"d{stage}" if len(table.stages_behind(stage)) == 1 else f"d{stage}.{source}"
