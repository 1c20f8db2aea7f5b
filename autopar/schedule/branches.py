"""Branches of a model side by side: stages are a graph, and those that do not wait for each other run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.check import check_after
from autopar.schedule.table import Table, Task


@final
@dataclass(frozen=True)
class Branches(Schedule):
    """Independent branches of a model on workers of their own, and what joins them on one of these.

    The pipeline of a graph of stages (Jeon et al., GraphPipe, 2024, ASPLOS'25, section 5): each stage does 1F1B with as
    many microbatches in flight as the longest way from it to the end has stages. Of what a worker can begin it takes
    backward passes first, then forward passes that other workers wait for, then that of the highest stage. Where
    nothing waits, branches of equal time take that of one.

    Args:
        after: by stage the earlier stages that it waits for. Empty: the last waits for all others, which wait for none.
        workers: by stage its worker; empty where each stage has one of its own.
        trains: whether there is a backward pass.
    """

    after: tuple[tuple[int, ...], ...] = ()
    workers: tuple[int, ...] = ()
    trains: bool = True
    name = "branches"

    def _graph(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """The stages before each; without a graph all before the last one are side by side."""
        return self.after or (*((),) * (num_stages - 1), tuple(range(num_stages - 1)))

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Raises ScheduleError unless both numbers are positive, and the stages are those that it was made for."""
        check_counts(self.name, num_stages, num_microbatches)
        for given in (self.after, self.workers):
            if given and len(given) != num_stages:
                raise ScheduleError(
                    f"schedule branches was made for a graph of {len(given)} stages, not {num_stages}",
                    remedy=f"use {len(given)} stages",
                )
        check_after(self.name, self._graph(num_stages))

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order, for all positive numbers, or the number of stages that it was made for."""
        self.check(num_stages, num_microbatches)
        after, workers = self._graph(num_stages), self.workers or tuple(range(num_stages))
        rows = _GreedyRows(after, workers, num_microbatches, self.trains).rows()
        return Table(self.name, num_stages, num_microbatches, rows, after)


class _GreedyRows:
    """A run in which a backward pass takes twice as long as a forward pass; what workers take in it are their rows."""

    def __init__(
        self, after: Sequence[Sequence[int]], workers: Sequence[int], num_microbatches: int, trains: bool
    ) -> None:
        stages = range(len(after))
        self.after, self.workers, self.count, self.trains = after, workers, num_microbatches, trains
        self.successors = [[t for t in stages if s in after[t]] for s in stages]
        self.most = [1 for _ in stages]
        for s in reversed(stages):
            self.most[s] = 1 + max((self.most[t] for t in self.successors[s]), default=0)
        self.ends: dict[tuple[str, int, int], int] = {}
        self.done = {kind: [0 for _ in stages] for kind in ("forward", "backward")}

    def rows(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks, by worker."""
        count = max(self.workers) + 1
        rows: list[list[Task]] = [[] for _ in range(count)]
        free, now = [0] * count, 0
        left = len(self.after) * self.count * (2 if self.trains else 1)
        while left:
            for worker in range(count):
                task = self._next(worker, now) if free[worker] <= now else None
                if task is not None:
                    rows[worker].append(task)
                    free[worker] = now + (2 if task.kind == "backward" else 1)
                    self.ends[task.kind, task.stage, task.microbatch] = free[worker]
                    self.done[task.kind][task.stage] += 1
                    left -= 1
            now += 1
        return tuple(map(tuple, rows))

    def _next(self, worker: int, now: int) -> Task | None:
        """The next task of a worker; None where all of its tasks wait."""
        stages = [s for s, w in enumerate(self.workers) if w == worker][::-1]
        for s in stages:
            k = self.done["backward"][s]
            needs = [("forward", s, k), *(("backward", t, k) for t in self.successors[s])]
            if self.trains and k < self.count and self._over(needs, now):
                return Task("backward", s, k)
        for s in sorted(stages, key=lambda s: all(self.workers[t] == worker for t in self.successors[s])):
            k = self.done["forward"][s]
            full = self.trains and k - self.done["backward"][s] >= self.most[s]
            if k < self.count and not full and self._over([("forward", t, k) for t in self.after[s]], now):
                return Task("forward", s, k)
        return None

    def _over(self, needs: Sequence[tuple[str, int, int]], now: int) -> bool:
        return all(self.ends.get(n, now + 1) <= now for n in needs)
