"""1F1B: one forward, one backward; and the rows of tasks that its relatives share.

`warm_up_row` is the row of 1F1B: some forwards first, then one backward for each forward. `zero_bubble_row` is the
same with weight gradients as tasks of their own, for ZB-H1, ZB-H2 and ZB-V.
"""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.table import Table, Task


def warm_up_row(stage: int, num_microbatches: int, in_flight: int) -> tuple[Task, ...]:
    """Tasks of a stage of 1F1B: ``in_flight`` forwards, then backward and forward in turn, then backwards."""
    row = [Task("forward", stage, k) for k in range(min(in_flight, num_microbatches))]
    for microbatch in range(num_microbatches):
        row.append(Task("backward", stage, microbatch))
        if microbatch + in_flight < num_microbatches:
            row.append(Task("forward", stage, microbatch + in_flight))
    return tuple(row)


def zero_bubble_row(stage: int, num_microbatches: int, in_flight: int, limit: int) -> tuple[Task, ...]:
    """Tasks of a stage of 1F1B whose weight gradients wait until the stage is idle, or their memory is needed.

    Args:
        stage: the stage.
        num_microbatches: parts of the batch.
        in_flight: microbatches between forward and backward.
        limit: microbatches between forward and weight gradient.
    """
    row: list[Task] = []
    forward = backward = weight = 0
    while weight < num_microbatches:
        wants_forward = forward < num_microbatches and forward - backward < in_flight
        if wants_forward and forward - weight < limit:
            row.append(Task("forward", stage, forward))
            forward += 1
        elif wants_forward and weight < backward:
            row.append(Task("weight", stage, weight))
            weight += 1
        elif backward < num_microbatches:
            row.append(Task("backward", stage, backward))
            backward += 1
            if forward == num_microbatches:  # while it drains, the next backward is not there at once
                row.append(Task("weight", stage, weight))
                weight += 1
        else:
            row.append(Task("weight", stage, weight))
            weight += 1
    return tuple(row)


@final
class OneFOneB(ScheduleByNumbers):
    """Backward as early as possible: as fast as GPipe, with fewer activations.

    PipeDream-flush in Narayanan et al. (2021, SC), section 2.2.1; DAPPLE, Fan et al. (2021). Bubble (p-1)/(m+p-1);
    min(m, p-i) microbatches in flight on stage i.
    """

    name = "1f1b"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        rows = tuple(warm_up_row(s, num_microbatches, num_stages - s) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)
