"""`Dataflow`: what the works of a pipeline read and write, in names and bytes; supplied by the lowering or a plan.

`chain_dataflow` makes the one of a plain chain or graph of stages, for pictures of schedules, estimates and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias

from autopar.plan.pipeline import Lifetime, Reduce, WorkKind
from autopar.schedule.table import Table, Task


@dataclass(frozen=True, order=True)
class Work:
    """One compiled program of a stage.

    Args:
        kind: when it runs.
        stage: the stage whose devices run it.
        part: counts up inside "before", "meeting" and "update" where values cross stages: a part reads what lower parts
            of any stage wrote (global norm: part 0 sums up locally, part 1 reads all sums). Of the other kinds it is
            the slice of tokens.
    """

    kind: WorkKind
    stage: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}" + (f" part {self.part}" if self.part else "")


#: What a value is to the programs of stages: an input of the step whole ("in") or a microbatch's shard of it
#: ("batch"); an input in the layout of the loop ("loop") or computed before it for after it ("early"); what the
#: backward pass needs of the forward pass ("activation"); what microbatches add up ("sum"); what parts of the update
#: pass on ("mid"); an output of the step ("out"); what stages send in the loop ("from"), after it ("late") and where
#: examples meet ("met"); what microbatches bring there ("terms"); all
#: parameters and optimizer state of a stage together ("state"), its activations ("activations"), what its weight
#: gradients need beyond those ("stash"), its gradients ("gradients").
RefKind: TypeAlias = Literal[
    "in", "batch", "loop", "early", "activation", "sum", "mid", "out", "from", "late", "met", "terms",
    "state", "activations", "stash", "gradients",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Reference of a value of the dataflow to a value of the step; its text names the value there.

    Args:
        kind: how the value is part of the step: an input, an output, of a microbatch, sent by another stage, ...
        name: of the value in the step; the number of an output; "" for all values of that kind of a stage.
        stage: the stage whose own it is; None where stages share it.
        slice: the slice of tokens whose it is; None where all slices share it, or a microbatch has none.
    """

    kind: RefKind
    name: str = ""
    stage: int | None = None
    slice: int | None = None

    @property
    def number(self) -> int:
        """Number of an output of the step."""
        return int(self.name)

    def __str__(self) -> str:
        name = self.kind + (f"/{self.name}" if self.name else "") + ("" if self.stage is None else f"@{self.stage}")
        return name if self.slice is None else f"{name}#{self.slice}"


@dataclass(frozen=True)
class WorkSpec:
    """Reads and writes of one work.

    Args:
        work: the work.
        reads: names of values, in the order of the program's arguments.
        writes: names of values, in the order of the program's results.
        accumulates: names of accumulators; the program has one more result for each, after ``writes``: what this
            microbatch contributes.
        temporaries_bytes: bytes a device that it needs besides what it reads and writes.
        aliases: (read, write) pairs that share a buffer wherever the one that is read is donated.
    """

    work: Work
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    accumulates: tuple[str, ...] = ()
    temporaries_bytes: int = 0
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ValueSpec:
    """A value that works pass on.

    Args:
        name: unique in the dataflow.
        bytes: bytes a device of one buffer: for "microbatch" of one microbatch's copy, for "accumulator" of what one
            microbatch contributes (one that is concatenated grows by this much a microbatch).
        lifetime: "step": one buffer (parameters, constants, results of "before", "meeting" and "update"); "microbatch":
            one buffer a microbatch; "accumulator": contributions of all microbatches, joined.
        reduce: how contributions are joined; None for all but accumulators.
        stages: stages on whose workers an input lies when the step begins. Empty for what works write. A tied parameter
            has two. A microbatch input lies on the worker that runs the forward of its stage.
        donated: of an input: the program may give the buffer up. Others belong to the caller and stay.
        result: the caller gets it: it stays on the workers that wrote or accumulated it.
        host: whether a microbatch's value is in host memory between its uses.
        ref: which value of the step it is, whose text is ``name``; None where that is not known.
    """

    name: str
    bytes: int
    lifetime: Lifetime
    reduce: Reduce | None = None
    stages: tuple[int, ...] = ()
    donated: bool = False
    result: bool = False
    host: bool = False
    ref: ValueRef | None = None

    @property
    def is_input(self) -> bool:
        """Whether it is there when the step begins."""
        return bool(self.stages)


@dataclass(frozen=True)
class Dataflow:
    """All works and values of a pipeline. `autopar.schedule.check_dataflow` says whether they fit a table.

    Args:
        works: one for each kind and stage, several for "before" and "update" with parts, and one for each slice.
        values: all that they name.
    """

    works: tuple[WorkSpec, ...]
    values: tuple[ValueSpec, ...]

    @cached_property
    def by_work(self) -> Mapping[Work, WorkSpec]:
        """Specification of each work."""
        return MappingProxyType({w.work: w for w in self.works})

    @cached_property
    def by_name(self) -> Mapping[str, ValueSpec]:
        """Specification of each value."""
        return MappingProxyType({v.name: v for v in self.values})

    @cached_property
    def readers(self) -> Mapping[str, tuple[Work, ...]]:
        """Works that read each value; values that nobody reads are left out."""
        readers: dict[str, list[Work]] = {}
        for spec in self.works:
            for name in dict.fromkeys(spec.reads):
                readers.setdefault(name, []).append(spec.work)
        return MappingProxyType({name: tuple(works) for name, works in readers.items()})

    @cached_property
    def meets(self) -> bool:
        """Whether something runs between all forward passes and all backward passes."""
        return any(s.work.kind == "meeting" for s in self.works)

    @cached_property
    def writers(self) -> Mapping[str, Work]:
        """The work that writes each value or accumulates into it; inputs are left out."""
        return MappingProxyType({n: s.work for s in self.works for n in (*s.writes, *s.accumulates)})


def work_of(task: Task) -> Work:
    """The work that a task runs."""
    return Work(task.kind, task.stage, task.slice)


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
        out = (f"y{s}",) if table.stages_after(s) else ()
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
    reads = (f"w{s}", f"k{s}", *(_gradient(table, s, t) for t in table.stages_after(s)))
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
    return f"d{stage}" if len(table.stages_after(stage)) == 1 else f"d{stage}.{source}"
