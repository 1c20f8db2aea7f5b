"""Dataflows of plain chains of stages that pass slices of tokens on."""

from __future__ import annotations

from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec
from autopar.schedule.table import Table


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
