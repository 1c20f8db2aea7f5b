"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.table import Table, Task


@final
class GPipe(ScheduleByNumbers):
    """All forwards, then all backwards in reverse.

    Huang et al., GPipe (2019), section 2.3. Bubble (p-1)/(m+p-1); m microbatches in flight on every stage.
    """

    name = "gpipe"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        rows = tuple(
            (
                *(Task("forward", s, k) for k in range(num_microbatches)),
                *(Task("backward", s, k) for k in reversed(range(num_microbatches))),
            )
            for s in range(num_stages)
        )
        return Table(self.name, num_stages, num_microbatches, rows)
