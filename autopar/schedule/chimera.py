"""Chimera: two pipelines in opposite directions on the same workers."""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.table import Table, Task


@final
class Chimera(ScheduleByNumbers):
    """Half of the microbatches enter at the first worker, half at the last; each worker holds two stages' weights.

    Li and Hoefler, Chimera (2021), section 3.1, with one model replica pair and units of p microbatches put one after
    the other (section 3.5). Where p divides m and forward takes as long as backward the bubble is (p-2)/(2m+p-2);
    p/2+1 to p microbatches in flight.
    """

    name = "chimera"
    stages_multiple = 2

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for even numbers of stages."""
        self.check(num_stages, num_microbatches)
        # (slot, direction, task): the two directions never meet in a slot while a unit has at most p microbatches.
        cells: list[list[tuple[int, int, Task]]] = [[] for _ in range(num_stages)]
        for unit, first in enumerate(range(0, num_microbatches, num_stages)):
            size = min(num_stages, num_microbatches - first)
            halves = (range(first, first + (size + 1) // 2), range(first + (size + 1) // 2, first + size))
            for direction, microbatches in enumerate(halves):
                for stage in range(num_stages):
                    worker = num_stages - 1 - stage if direction else stage
                    for k, microbatch in enumerate(microbatches):
                        slot = 2 * (unit * num_stages + k)
                        cells[worker] += [
                            (slot + stage, direction, Task("forward", stage, microbatch)),
                            (slot + 2 * num_stages - 1 - stage, direction, Task("backward", stage, microbatch)),
                        ]
        rows = tuple(tuple(task for _, _, task in sorted(line)) for line in cells)
        return Table(self.name, num_stages, num_microbatches, rows)
