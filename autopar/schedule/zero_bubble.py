"""Zero-bubble schedules (Qi et al., ICLR'24): weight gradients fill the bubble, as passes of their own.

ZB-H1 stays within the memory of 1F1B. ZB-H2 has nearly no bubble, for twice the activations. ZB-V has two stages a
worker, laid out as a V, and no bubble with the memory of 1F1B.
"""

from __future__ import annotations

from typing import final

from autopar.schedule.base import ScheduleByNumbers
from autopar.schedule.one_f_one_b import zero_bubble_row
from autopar.schedule.table import Kind, Table, Task


def bubble_left(forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> float:
    """Share of the bubble of 1F1B that ZB-H1 leaves, (F + B - W) / (F + B + W).

    Args:
        forward: F, seconds of a forward pass; the three are taken to be equal where nothing tells them apart.
        backward: B, seconds of a backward pass for inputs.
        weight: W, seconds of one for weights.
    """
    return (forward + backward - weight) / (forward + backward + weight)


@final
class ZbH1(ScheduleByNumbers):
    """1F1B with the weight gradients put off until the pipeline drains.

    Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2.2. With F, B, W the times of the three kinds and
    W no longer than F and B, every worker idles (p-1)(F+B-W) where m >= p; p microbatches in flight (counted to the
    weight gradient) on every stage, as the fullest stage of 1F1B has.
    """

    name = "zb-h1"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        rows = tuple(zero_bubble_row(s, num_microbatches, num_stages - s, num_stages) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)


@final
class ZbH2(ScheduleByNumbers):
    """ZB-H1 with enough forwards ahead that workers never wait if all kinds take the same time.

    Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2.3. From a worker's first task to its last it idles at
    most (p-1)(F+B-2W) where m >= 2p-1 and W is no longer than F and B. Workers start and end one after another, so
    this is the bubble of steps that follow each other without a barrier. min(m, 2p-1) microbatches in flight.
    """

    name = "zb-h2"

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for all positive numbers."""
        self.check(num_stages, num_microbatches)
        limit = 2 * num_stages - 1
        rows = tuple(zero_bubble_row(s, num_microbatches, limit - 2 * s, limit) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)


@final
class ZbV(ScheduleByNumbers):
    """Worker w holds the stages w and 2p-1-w, so that the first worker has the loss and backward starts early.

    Qi et al., Zero Bubble Pipeline Parallelism (2024), section 6. From its first task to its last no worker idles if
    F, B and W take the same time and m >= 2p-1; min(2m, 2p) stage activations in flight, the bytes of p whole stages.
    """

    name = "zb-v"
    chunks = 2
    stages_multiple = 2

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for even numbers of stages."""
        self.check(num_stages, num_microbatches)
        workers = num_stages // 2
        rows = tuple(_row(w, workers, num_microbatches) for w in range(workers))
        return Table(self.name, num_stages, num_microbatches, rows)


def _row(worker: int, workers: int, num_microbatches: int) -> tuple[Task, ...]:
    # Made for as many microbatches as fill the pipeline; those that are not there are left out at the end.
    filled = max(num_microbatches, 2 * workers - 1)
    down, up = worker, 2 * workers - 1 - worker
    counts: dict[tuple[Kind, int], int] = {}
    row: list[Task] = []

    def add(times: int, *passes: tuple[Kind, int]) -> None:
        for _ in range(times):
            for kind, stage in passes:
                microbatch = counts.get((kind, stage), 0)
                if microbatch < filled:
                    counts[kind, stage] = microbatch + 1
                    row.append(Task(kind, stage, microbatch))

    on_down: tuple[tuple[Kind, int], ...] = (("forward", down), ("backward", down), ("weight", down))
    on_up: tuple[tuple[Kind, int], ...] = (("forward", up), ("backward", up), ("weight", up))
    # Until the first microbatch has come down and up again.
    add(2 * (workers - worker) - 1, on_down[0])
    add(worker, on_up[0], on_down[0])
    # Until its gradient has come down and up again.
    add(workers - worker, *on_up)
    # Full: every pass of six takes one microbatch through each kind of work.
    add(filled - counts["forward", up], *on_down, *on_up)
    # Gradients first, as the worker below waits for them.
    add(worker, on_down[1], on_up[1])
    add(workers - worker, on_down[1], on_down[2])
    add(filled - counts["weight", up], on_up[2])
    add(filled - counts["weight", down], on_down[2])
    return tuple(t for t in row if t.microbatch < num_microbatches)
