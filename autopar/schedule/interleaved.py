"""Interleaved 1F1B: several stages a worker."""

from __future__ import annotations

from typing import final

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.table import Table, Task


@final
class Interleaved(Schedule):
    """1F1B where worker w holds the stages w, w+p, w+2p, ...: the bubble shrinks, there is more to send.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.2. With v
    chunks: bubble (p-1)/(v·m+p-1); min(v·m, 2(p-1-i) + (v-1)·p + 1) stage activations in flight on worker i.

    Args:
        chunks: stages a worker holds, at least 2.
    """

    name = "interleaved"

    def __init__(self, chunks: int = 2) -> None:
        if chunks < 2:
            raise ScheduleError(
                f"schedule interleaved has {chunks} stages a worker", remedy="use at least 2, or the schedule 1f1b"
            )
        self._chunks = chunks

    @property
    def chunks(self) -> int:
        """Stages a worker holds."""
        return self._chunks

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Raises ScheduleError unless chunks divide the stages, and workers the microbatches."""
        check_counts(self.name, num_stages, num_microbatches, self._chunks)
        workers = num_stages // self._chunks
        if num_microbatches % workers:
            lower = num_microbatches - num_microbatches % workers
            near = [n for n in (lower, lower + workers) if n > 0]
            raise ScheduleError(
                f"schedule interleaved on {workers} workers needs a number of microbatches that {workers} divides, "
                f"not {num_microbatches}",
                remedy="use " + " or ".join(map(str, near)) + " microbatches, or the schedule 1f1b",
            )

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The number of workers must divide the number of microbatches."""
        self.check(num_stages, num_microbatches)
        workers = num_stages // self._chunks
        rows = tuple(self._row(w, workers, num_microbatches) for w in range(workers))
        return Table(self.name, num_stages, num_microbatches, rows)

    def _row(self, worker: int, workers: int, num_microbatches: int) -> tuple[Task, ...]:
        passes = num_microbatches * self._chunks
        ahead = min(passes, 2 * (workers - 1 - worker) + (self._chunks - 1) * workers + 1)
        row = [self._pass("forward", k, worker, workers) for k in range(ahead)]
        for k in range(passes):
            row.append(self._pass("backward", k, worker, workers))
            if k + ahead < passes:
                row.append(self._pass("forward", k + ahead, worker, workers))
        return tuple(row)

    def _pass(self, kind: str, k: int, worker: int, workers: int) -> Task:
        """The k-th pass of a worker: p microbatches through a chunk, then the same through the next chunk."""
        group, rest = divmod(k, workers * self._chunks)
        chunk, within = divmod(rest, workers)
        microbatch = group * workers + within
        if kind == "forward":
            return Task("forward", chunk * workers + worker, microbatch)
        return Task("backward", (self._chunks - 1 - chunk) * workers + worker, microbatch)
