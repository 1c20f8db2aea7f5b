"""Inference: forwards alone."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.table import Table, Task


@final
class Inference(ScheduleByNumbers):
    """Microbatches one after the other, forward only. Bubble (p-1)/(m+p-1); one microbatch on a stage at a time."""

    name = "inference"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        rows = tuple(tuple(Task("forward", s, k) for k in range(num_microbatches)) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
