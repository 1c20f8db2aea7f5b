"""ZB-H1: weight gradients fill the bubble, within the memory of 1F1B."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.one_f_one_b import zero_bubble_row
from autopar.schedule.table import Table


@final
class ZbH1(Schedule):
    """1F1B with the weight gradients put off until the pipeline drains.

    Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2.2. With F, B, W the times of the three kinds and
    W no longer than F and B, every worker idles (p-1)(F+B-W) where m >= p; p microbatches in flight (counted to the
    weight gradient) on every stage, as the fullest stage of 1F1B has.
    """

    @property
    def name(self) -> str:
        """Name of the schedule: ``zb-h1``."""
        return "zb-h1"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """See `Schedule.table`; exists for all positive numbers."""
        check_counts(self.name, num_stages, num_microbatches)
        rows = tuple(zero_bubble_row(s, num_microbatches, num_stages - s, num_stages) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
