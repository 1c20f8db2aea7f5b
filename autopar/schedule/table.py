"""`Table`: what each worker computes, in order. No communication, no memory, no times.

`run_round_robin` takes workers in turn, each as far as it comes: everything that reads rows or instruction lists walks
them so. As no task and no instruction chooses, what comes out does not depend on the order in which workers are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar, get_args

Item = TypeVar("Item")
#: Where a schedule splits backward, "backward" is the gradient of the inputs and "weight" that of the weights;
#: otherwise "backward" is both.
Kind: TypeAlias = Literal["forward", "backward", "weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_LETTERS: Mapping[str, str] = MappingProxyType({"forward": "F", "backward": "B", "weight": "W"})
_KINDS: Mapping[str, Kind] = MappingProxyType({"F": "forward", "B": "backward", "W": "weight"})


def run_round_robin(
    lists: Sequence[Sequence[Item]], at: list[int], carry_out: Callable[[int, Item], bool]
) -> tuple[int, ...]:
    """Carries out items until no worker comes further.

    Args:
        lists: what each worker has to do, in order.
        at: how many each has carried out; counted on in place, so that ``carry_out`` can tell where it is.
        carry_out: (worker, its next item) -> whether it was carried out; False where it must wait for another worker.

    Returns:
        The workers that wait for ever; none where all lists came to their end.
    """
    moved = True
    while moved:
        moved = False
        for worker, line in enumerate(lists):
            while at[worker] < len(line) and carry_out(worker, line[at[worker]]):
                at[worker] += 1
                moved = True
    return tuple(worker for worker, line in enumerate(lists) if at[worker] < len(line))


@dataclass(frozen=True, order=True)
class Task:
    """One pass of one microbatch through one stage.

    Args:
        kind: forward, backward or weight.
        stage: the stage, from 0; stages of interleaved schedules are counted along the model, not by worker.
        microbatch: the microbatch, from 0.
        slice: the slice of tokens of the microbatch, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        suffix = f"/{self.slice}" if self.slice else ""
        return f"{_LETTERS[self.kind]}{self.stage}.{self.microbatch}{suffix}"

    @staticmethod
    def parse(text: str) -> Task | None:
        """The task in ``F0.3`` (forward), ``B0.3`` or ``W0.3`` of stage 0, microbatch 3; None where it is none.

        ``F0.3/1`` is of its slice 1, ``F0.3`` of its slice 0, which may be all of it.
        """
        kind = _KINDS.get(text[:1].upper())
        stage, dot, rest = text[1:].partition(".")
        microbatch, slash, slice_ = rest.partition("/")
        parts = (stage, microbatch, slice_) if slash else (stage, microbatch)
        numbers = text.isascii() and all(part.isdecimal() for part in parts)
        return Task(kind, int(stage), int(microbatch), int(slice_ or 0)) if kind and dot and numbers else None


@dataclass(frozen=True)
class Table:
    """A compute-only schedule. `autopar.schedule.check_table` says whether it can run.

    Args:
        name: name of the schedule.
        num_stages: stages of the model; with several stages a worker there are fewer workers.
        num_microbatches: parts of the batch.
        rows: for each worker its tasks, in the order in which it takes them.
        after: by stage the earlier stages whose forward pass it waits for, where stages are a graph; empty where each
            waits for the one before it.
        num_slices: slices of tokens of each microbatch.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Task, ...], ...]
    after: tuple[tuple[int, ...], ...] = ()
    num_slices: int = 1

    @property
    def num_workers(self) -> int:
        """Number of workers: devices, or groups of devices that hold a stage together."""
        return len(self.rows)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that occur: forward; forward and backward; or all three."""
        present = {t.kind for row in self.rows for t in row}
        return tuple(k for k in KINDS if k in present)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are tasks of their own."""
        return "weight" in self.kinds

    @cached_property
    def _workers(self) -> Mapping[Task, int]:
        return MappingProxyType({t: w for w, row in enumerate(self.rows) for t in row})

    @cached_property
    def _stage_workers(self) -> Mapping[int, tuple[int, ...]]:
        workers_of: dict[int, set[int]] = {}
        for task, worker in self._workers.items():
            workers_of.setdefault(task.stage, set()).add(worker)
        return MappingProxyType({s: tuple(sorted(workers)) for s, workers in sorted(workers_of.items())})

    def worker_of(self, task: Task) -> int:
        """The worker that computes ``task``. KeyError where none does."""
        return self._workers[task]

    def workers_of_stage(self, stage: int) -> tuple[int, ...]:
        """Workers that hold ``stage``, ascending: one, or two in Chimera, where a microbatch takes one of them."""
        return self._stage_workers.get(stage, ())

    def stages_of_worker(self, worker: int) -> tuple[int, ...]:
        """Stages that ``worker`` holds, ascending."""
        return tuple(sorted({t.stage for t in self.rows[worker]}))

    @cached_property
    def _stages_after(self) -> Mapping[int, tuple[int, ...]]:
        """Stages that wait for each stage, where stages are a graph."""
        stages = range(self.num_stages)
        return MappingProxyType({s: tuple(t for t in stages if s in self.after[t]) for s in stages})

    def stages_before(self, stage: int) -> tuple[int, ...]:
        """Stages whose forward pass must be over before that of ``stage``, ascending."""
        if self.after:
            return self.after[stage]
        return (stage - 1,) if stage else ()

    def stages_after(self, stage: int) -> tuple[int, ...]:
        """Stages whose forward pass waits for that of ``stage``, ascending."""
        if self.after:
            return self._stages_after[stage]
        return (stage + 1,) if stage + 1 < self.num_stages else ()

    def needs(self, task: Task) -> tuple[Task, ...]:
        """Tasks that must be over before ``task``: those of the neighbour stages, of its own forward, and of slices
        before it: earlier ones in forward, later ones in backward."""
        kind, stage, microbatch, slice_ = task.kind, task.stage, task.microbatch, task.slice
        if kind == "forward":
            before = [Task("forward", s, microbatch, slice_) for s in self.stages_before(stage)]
            return (*before, *([Task("forward", stage, microbatch, slice_ - 1)] if slice_ else []))
        if kind == "weight":
            return (Task("backward", stage, microbatch, slice_),)
        needed = [Task("forward", stage, microbatch, slice_)]
        needed += [Task("backward", s, microbatch, slice_) for s in self.stages_after(stage)]
        if slice_ + 1 < self.num_slices:
            needed.append(Task("backward", stage, microbatch, slice_ + 1))
        return tuple(needed)

    def contribution(self, task: Task) -> int:
        """Index of the task's gradient among all that its stage adds up: microbatch times slices, plus slice."""
        return task.microbatch * self.num_slices + task.slice

    @cached_property
    def unit_starts(self) -> Mapping[Task, int]:
        """Start of each task if all take one unit of time, and sending takes none."""
        return MappingProxyType(start_times(self, UNITS))

    def __str__(self) -> str:
        return table_text(self)


def start_times(table: Table, lengths: Mapping[str, int]) -> dict[Task, int]:
    """Start of each task if a task of a kind takes ``lengths[kind]`` units and sending takes none.

    Tasks that wait for each other in a circle, or for a task that no worker has, are left out, with all that
    come after them.
    """
    starts: dict[Task, int] = {}
    ends: dict[Task, int] = {}
    free = [0] * table.num_workers

    def start(worker: int, task: Task) -> bool:
        needs = table.needs(task)
        if any(n not in ends for n in needs):
            return False
        starts[task] = max([free[worker], *(ends[n] for n in needs)])
        ends[task] = free[worker] = starts[task] + lengths[task.kind]
        return True

    run_round_robin(table.rows, [0] * table.num_workers, start)
    return starts


UNITS: Mapping[str, int] = MappingProxyType({kind: 1 for kind in KINDS})


def grid(table: Table) -> tuple[tuple[Task | None, ...], ...]:
    """Cells of each worker, one a unit of time (all tasks take one), None where it waits.

    A table that cannot run has its tasks without the waiting between them.
    """
    starts = table.unit_starts
    if any(t not in starts for row in table.rows for t in row) or len(starts) != sum(map(len, table.rows)):
        return table.rows
    length = max(starts.values(), default=-1) + 1
    lines = []
    for row in table.rows:
        line: list[Task | None] = [None] * length
        for task in row:
            line[starts[task]] = task
        while line and line[-1] is None:
            line.pop()
        lines.append(tuple(line))
    return tuple(lines)


def table_text(table: Table) -> str:
    """The table as text: a line a worker, a column a unit of time; `autopar.schedule.parse_table` reads it."""
    cells, _ = _cells(table, None)
    return _head(table) + _lines(cells, range(table.num_workers), range(max(map(len, cells), default=0)))


#: A table in an error message has at most so many lines and columns around the marked cell.
_MOST_WORKERS, _MOST_COLUMNS = 16, 32


def marked_text(table: Table, mark: Task | tuple[int, int] | None) -> str:
    """The table for an error message: one cell between ``>`` and ``<``, and of a large table what is around it.

    Args:
        table: what to show.
        mark: a task, or (worker, position in its row); None marks nothing.
    """
    cells, (worker, column) = _cells(table, mark)
    workers = _around(worker, table.num_workers, _MOST_WORKERS)
    length = max(map(len, cells), default=0)
    columns = _around(column, length, _MOST_COLUMNS)
    cut = (
        ""
        if len(workers) == table.num_workers and len(columns) == length
        else (
            f"workers {workers.start} to {workers.stop - 1} of {table.num_workers}, "
            f"columns {columns.start} to {columns.stop - 1} of {length}\n"
        )
    )
    return _head(table) + cut + _lines(cells, workers, columns)


def _around(place: int, length: int, most: int) -> range:
    start = min(max(0, place - most // 2), max(0, length - most))
    return range(start, min(length, start + most))


def _head(table: Table) -> str:
    counts = f"schedule {table.name}, {table.num_stages} stages, {table.num_microbatches} microbatches"
    slices = f", {table.num_slices} slices" if table.num_slices > 1 else ""
    return counts + slices + (f", after {after_text(table)}" if table.after else "") + "\n"


def after_text(table: Table) -> str:
    """The stages that each stage waits for where stages are a graph: ``- | - | 0 1``; "" where they are a chain."""
    return " | ".join(" ".join(map(str, stages)) or "-" for stages in table.after)


def _cells(table: Table, mark: Task | tuple[int, int] | None) -> tuple[list[list[str]], tuple[int, int]]:
    """The text of all cells, and (worker, column) of the marked one."""
    cells: list[list[str]] = []
    place = (0, 0)
    for worker, line in enumerate(grid(table)):
        position = -1
        texts: list[str] = []
        for cell in line:
            position += cell is not None
            if cell is not None and (cell == mark or (worker, position) == mark):
                place = (worker, len(texts))
                texts.append(f">{cell}<")
            else:
                texts.append("." if cell is None else str(cell))
        cells.append(texts)
    return cells, place


def _lines(cells: list[list[str]], workers: range, columns: range) -> str:
    shown = {w: cells[w][columns.start : columns.stop] for w in workers}
    widths = [
        max([len(texts[i]) for texts in shown.values() if i < len(texts)], default=0) for i in range(len(columns))
    ]
    label = len(str(max(0, len(cells) - 1)))
    lines = (
        f"{worker:>{label}} | " + " ".join(t.ljust(w) for t, w in zip(texts, widths, strict=False))
        for worker, texts in shown.items()
    )
    return "".join(line.rstrip() + "\n" for line in lines)
