"""A dataflow with everything that models have: skip connections, tied parameters, global norm, auxiliary outputs."""

from __future__ import annotations

from autopar.schedule import Dataflow, Table, ValueSpec, Work, WorkSpec


def rich(table: Table) -> Dataflow:
    """Stage 0 and the last share the parameter ``emb``; stage 0 also hands a value straight to the last one.

    ``count`` is made before the loop on the last stage from ``mask`` and used there by every microbatch and by the
    update of stage 0. ``aux`` is concatenated, ``top`` is a maximum. Gradients are clipped by the global norm.
    """
    last = table.num_stages - 1
    trains = "backward" in table.kinds
    ends = (0, last) if last else (0,)
    values = [
        ValueSpec("tokens", 3, "microbatch", stages=(0,), donated=True),
        ValueSpec("labels", 2, "microbatch", stages=(last,)),
        ValueSpec("mask", 4, "step", stages=(last,), donated=True),
        ValueSpec("rate", 1, "step", stages=tuple(range(table.num_stages))),
        ValueSpec("emb", 50, "step", stages=ends, donated=trains),
        ValueSpec("count", 1, "step"),
        ValueSpec("loss", 1, "accumulator", reduce="sum", result=not trains),
        ValueSpec("aux", 2, "accumulator", reduce="concatenate", result=True),
        ValueSpec("top", 2, "accumulator", reduce="max", result=True),
    ]
    works = [WorkSpec(Work("before", last), ("mask",), ("count",))]
    for s in range(table.num_stages):
        values.append(ValueSpec(f"w{s}", 20, "step", stages=(s,), donated=trains))
        reads = [f"w{s}", f"y{s - 1}" if s else "tokens"]
        writes = []
        accumulates = []
        if s == 0:
            reads.append("emb")
            accumulates.append("top")
        if s < last:
            writes.append(f"y{s}")
            values.append(ValueSpec(f"y{s}", 5, "microbatch"))
        if s == 0 and last > 1:
            writes.append("skip")
            values.append(ValueSpec("skip", 7, "microbatch"))
        if s == last:
            reads += ["labels", "count", *(["emb"] if s else []), *(["skip"] if last > 1 else [])]
            accumulates += ["loss", "aux"]
        if trains:
            writes.append(f"k{s}")
            values.append(ValueSpec(f"k{s}", 11, "microbatch"))
        works.append(WorkSpec(Work("forward", s), tuple(reads), tuple(writes), tuple(accumulates), 6))
        if trains:
            _backward(table, s, works, values)
    if trains:
        _update(table, works, values)
    return Dataflow(tuple(works), tuple(values))


def _backward(table: Table, s: int, works: list[WorkSpec], values: list[ValueSpec]) -> None:
    last = table.num_stages - 1
    reads = [f"w{s}", f"k{s}", *([f"d{s}"] if s < last else ["labels"])]
    writes = []
    if s == 0 and last > 1:
        reads.append("dskip")
    if s == last and last > 1:
        writes.append("dskip")
        values.append(ValueSpec("dskip", 7, "microbatch"))
    if s:
        writes.append(f"d{s - 1}")
        values.append(ValueSpec(f"d{s - 1}", 5, "microbatch"))
    gradients = [f"g{s}", *([f"gemb{s}"] if s in (0, last) else [])]
    values += [ValueSpec(g, 50 if g.startswith("gemb") else 20, "accumulator", reduce="sum") for g in gradients]
    if table.splits_backward:
        writes.append(f"h{s}")
        values.append(ValueSpec(f"h{s}", 4, "microbatch"))
        works.append(WorkSpec(Work("backward", s), tuple(reads), tuple(writes), (), 3))
        works.append(WorkSpec(Work("weight", s), (f"k{s}", f"h{s}"), (), tuple(gradients)))
    else:
        works.append(WorkSpec(Work("backward", s), tuple(reads), tuple(writes), tuple(gradients), 3))


def _update(table: Table, works: list[WorkSpec], values: list[ValueSpec]) -> None:
    last = table.num_stages - 1
    norms = tuple(f"norm{s}" for s in range(table.num_stages))
    both = ("gemb0", f"gemb{last}") if last else ("gemb0",)
    for s in range(table.num_stages):
        values.append(ValueSpec(f"norm{s}", 1, "step"))
        values.append(ValueSpec(f"new{s}", 20, "step", result=True))
        extra = both if s == 0 else ()
        works.append(WorkSpec(Work("update", s), (f"g{s}", *extra), (f"norm{s}",)))
        reads = [f"w{s}", f"g{s}", "rate", *norms]
        writes = [f"new{s}"]
        aliases = [(f"w{s}", f"new{s}")]
        if s in (0, last):
            name = f"newemb{s}"
            values.append(ValueSpec(name, 50, "step", result=True))
            reads += ["emb", *both]
            writes.append(name)
            aliases.append(("emb", name))
        if s == last:
            values.append(ValueSpec("mean", 1, "step", result=True))
            reads.append("loss")
            writes.append("mean")
        if s == 0:
            reads.append("count")
        works.append(WorkSpec(Work("update", s, 1), tuple(reads), tuple(writes), aliases=tuple(aliases)))
