"""ZB-H2: nearly no bubble, for twice the activations."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.one_f_one_b import zero_bubble_row
from autopar.schedule.table import Table


@final
class ZbH2(Schedule):
    """ZB-H1 with enough forwards ahead that workers never wait if all kinds take the same time.

    Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2.3. From a worker's first task to its last it idles at
    most (p-1)(F+B-2W) where m >= 2p-1 and W is no longer than F and B. Workers start and end one after another, so
    this is the bubble of steps that follow each other without a barrier. min(m, 2p-1) microbatches in flight.
    """

    @property
    def name(self) -> str:
        """Name of the schedule: ``zb-h2``."""
        return "zb-h2"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """See `Schedule.table`; exists for all positive numbers."""
        check_counts(self.name, num_stages, num_microbatches)
        limit = 2 * num_stages - 1
        rows = tuple(zero_bubble_row(s, num_microbatches, limit - 2 * s, limit) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
