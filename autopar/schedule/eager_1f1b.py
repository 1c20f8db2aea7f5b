"""Eager 1F1B: forwards run ahead, so that sending has time."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.one_f_one_b import warm_up_row
from autopar.schedule.table import Table


@final
class EagerOneFOneB(ScheduleByNumbers):
    """1F1B with about twice the forwards before the first backward, so that transfers overlap computing.

    Zhuang et al., On Optimizing the Communication of Model Parallelism (2023), section 4. Bubble as 1F1B where sending
    takes no time, less where it does; min(m, 2(p-i)-1) microbatches in flight on stage i.
    """

    name = "eager-1f1b"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        rows = tuple(warm_up_row(s, num_microbatches, 2 * (num_stages - s) - 1) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
