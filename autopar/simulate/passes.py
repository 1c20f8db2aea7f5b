"""Seconds of a step, from the table and the dataflow alone: no instruction list is made.

A large pipeline has a million of instructions, and a search that compares schedules wants their step times only. The
time is that of `autopar.simulate.run` of the lists that `autopar.schedule.build` makes; `is_plain` says for which
dataflows, `step_of` states how it comes about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule import Dataflow, Table, Task, Work, WorkSpec, marked_text, run_round_robin
from autopar.simulate.durations import Durations

#: A value on its way: (name, sending worker, receiving worker).
Route = tuple[str, int, int]


@dataclass(frozen=True)
class StepModel:
    """Result of `step_of`.

    Args:
        seconds: from the first pass to the end of the last, or of the last transfer.
        routes: values that workers send each other, sorted.
    """

    seconds: float
    routes: tuple[Route, ...]


def is_plain(dataflow: Dataflow) -> bool:
    """Whether `step_of` knows the time.

    Nothing runs before the microbatches or between their forward and backward passes, no input is a microbatch's,
    nothing waits in host memory or is concatenated, no input is read where it does not lie, and the update of a stage
    is one work that reads nothing that another made.
    """
    writers = {n: s.work.stage for s in dataflow.works for n in (*s.writes, *s.accumulates)}
    for value in dataflow.values:
        if value.host or value.reduce == "concatenate" or (value.is_input and value.lifetime == "microbatch"):
            return False
        readers = dataflow.readers.get(value.name, ())
        if value.is_input and any(w.stage not in value.stages for w in readers):
            return False
        if any(w.kind == "update" and writers.get(value.name, w.stage) != w.stage for w in readers):
            return False
    return all(s.work.part == 0 and s.work.kind not in ("before", "meeting") for s in dataflow.works)


def step_of(table: Table, dataflow: Dataflow, durations: Durations) -> StepModel:
    """The step time of a table.

    With e(x) the end of a pass x, d(x) its duration, and c(v, a, b) the duration of sending value v from worker a to b:

        start(x) = max(e(pass before x on its worker), arrival at its worker of all values that x reads)
        arrival(v, a) = e(maker of v) on the maker's own worker a
        arrival(v, b) = link(a, b) := max(link(a, b), e(maker)) + c(v, a, b) on another

    Values of one maker take a link in the order in which it writes them, to one worker after the other. Two workers of
    a stage exchange their gradients at the end, and every worker then does its updates.

    Args:
        table: a table that `autopar.schedule.check_table` accepts.
        dataflow: what `is_plain` accepts and `autopar.schedule.check_dataflow` for that table.
        durations: seconds of works and transfers.

    Raises:
        ScheduleError: a pass reads what is made only after it, or a work has no duration.
    """
    walk = _TimedWalk(table, dataflow, durations)
    stuck = run_round_robin(table.rows, walk.at, walk.carry_out)
    if stuck:
        task = table.rows[stuck[0]][walk.at[stuck[0]]]
        raise ScheduleError(
            f"schedule {table.name}: {task} waits for ever for what it reads",
            cause="the dataflow leads against the order of the stages",
            table=marked_text(table, task),
        )
    walk.update()
    return StepModel(walk.last - (0 if walk.first is None else walk.first), tuple(sorted(walk.routes)))


class _TimedWalk:
    """Times so far: of workers, of links, of values that arrived."""

    def __init__(self, table: Table, dataflow: Dataflow, durations: Durations) -> None:
        self.table, self.dataflow, self.durations = table, dataflow, durations
        self.at = [0] * table.num_workers
        self.free: list[float] = [0] * table.num_workers
        self.link: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.routes: set[Route] = set()
        self.first: float | None = None
        self.last: float = 0
        self.seconds: Mapping[Work, float] = {s.work: durations.of_work(s.work) for s in dataflow.works}
        # What passes of one stage give each other is there when it is wanted: they are on one worker, in order.
        self.reads = {s.work: tuple(n for n in s.reads if self._crosses(n)) for s in dataflow.works}
        self.sends = {s.work: self._sends(s) for s in dataflow.works}
        self.works = {(s.work.kind, s.work.stage, s.work.part): s.work for s in dataflow.works}

    def _crosses(self, name: str) -> bool:
        maker = self.dataflow.writers.get(name)
        return maker is not None and any(w.stage != maker.stage for w in self.dataflow.readers.get(name, ()))

    def _sends(self, spec: WorkSpec) -> tuple[tuple[str, tuple[Work, ...], tuple[int, ...]], ...]:
        """Values that a work sends, their readers, and the workers of these; none where microbatches take turns."""
        sent = []
        for name in filter(self._crosses, spec.writes):
            readers = tuple(w for w in self.dataflow.readers.get(name, ()) if w.kind != "update")
            workers = [self.table.workers_of_stage(w.stage) for w in readers]
            fixed = sorted({w for (w,) in workers}) if all(len(w) == 1 for w in workers) else ()
            sent.append((name, readers, tuple(fixed)))
        return tuple(sent)

    def carry_out(self, worker: int, task: Task) -> bool:
        """Sets the end of a pass and when what it makes arrives; False where something that it reads is not known."""
        work, microbatch = self.works[task.kind, task.stage, task.slice], task.microbatch
        start = self.free[worker]
        for name in self.reads[work]:
            arrival = self.arrived.get((name, microbatch, worker))
            if arrival is None:
                return False
            start = max(start, arrival)
        end = self._compute(work, worker, start)
        for name, readers, everywhere in self.sends[work]:
            self.arrived[name, microbatch, worker] = end
            for target in everywhere or self._targets(readers, microbatch):
                if target != worker:
                    self.arrived[name, microbatch, target] = self._transfer((name, worker, target), end)
        return True

    def _targets(self, readers: Sequence[Work], microbatch: int) -> list[int]:
        """Workers that take a value of a microbatch, ascending."""
        return sorted({self.table.worker_of(Task(r.kind, r.stage, microbatch)) for r in readers})  # type: ignore[arg-type]

    def _compute(self, work: Work, worker: int, start: float) -> float:
        """Time at which a work that a worker begins is over."""
        end = self.free[worker] = start + self.seconds[work]
        self.first = start if self.first is None else min(self.first, start)
        self.last = max(self.last, end)
        return end

    def _transfer(self, route: Route, ready: float) -> float:
        """Time at which a value that exists from ``ready`` on is on the other side of its link."""
        arrival = max(ready, self.link.get(route[1:], 0)) + self.durations.of_transfer(*route)
        self.link[route[1:]] = arrival
        self.routes.add(route)
        self.last = max(self.last, arrival)
        return arrival

    def update(self) -> None:
        """Seconds of the work after the last microbatch."""
        updates = [s for s in self.dataflow.works if s.work.kind == "update"]
        arrivals: dict[tuple[str, int], float] = {}
        for value in self.dataflow.values:
            if value.lifetime == "accumulator":
                arrivals.update(self._exchange(value.name))
        for spec in sorted(updates, key=lambda s: s.work):
            for worker in self.table.workers_of_stage(spec.work.stage):
                start = max([self.free[worker], *(arrivals.get((n, worker), 0) for n in spec.reads)])
                self._compute(spec.work, worker, start)

    def _exchange(self, name: str) -> Mapping[tuple[str, int], float]:
        """Time at which two workers of a stage have each other's partial sum of an accumulator."""
        workers = self.table.workers_of_stage(self.dataflow.writers[name].stage)
        if len(workers) != 2:
            return {}
        return {
            (name, other): self._transfer((name, worker, other), self.free[worker])
            for worker, other in (workers, workers[::-1])
        }
