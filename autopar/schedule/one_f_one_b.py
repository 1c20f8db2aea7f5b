"""1F1B: one forward, one backward."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.rows import warm_up_row
from autopar.schedule.table import Table


@final
class OneFOneB(Schedule):
    """Backward as early as possible: as fast as GPipe, with fewer activations.

    PipeDream-flush in Narayanan et al. (2021, SC), section 2.2.1; DAPPLE, Fan et al. (2021). Bubble (p-1)/(m+p-1);
    min(m, p-i) microbatches in flight on stage i.
    """

    @property
    def name(self) -> str:
        """Name of the schedule: ``1f1b``."""
        return "1f1b"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """See `Schedule.table`; exists for all positive numbers."""
        check_counts(self.name, num_stages, num_microbatches)
        rows = tuple(warm_up_row(s, num_microbatches, num_stages - s) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
