"""`Schedule`: the interface of all schedules."""

from __future__ import annotations

import abc

from autopar.errors import ScheduleError
from autopar.schedule.table import Table


class Schedule(abc.ABC):
    """A way to order the work of a pipeline.

    Subclasses are final and hold no state besides their options. They offer themselves under a name in
    `autopar.schedule.registry`.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name under which it is found."""

    @property
    def chunks(self) -> int:
        """Stages a worker holds (virtual stages): 1 unless the schedule says otherwise."""
        return 1

    @abc.abstractmethod
    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order.

        Args:
            num_stages: stages of the model, `chunks` times the number of workers.
            num_microbatches: parts of the batch.

        Raises:
            ScheduleError: the schedule does not exist for these numbers; the remedy says which would do.
        """

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Raises ScheduleError where the schedule does not exist for these numbers, as `table` does.

        Searches ask this of many numbers. A schedule that says so by its numbers overrides it; others make their table.

        Args:
            num_stages, num_microbatches: as of `table`.
        """
        self.table(num_stages, num_microbatches)

    def in_flight(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """The most forward passes whose activations each worker holds at once.

        A pass counts from its forward to its last backward or weight task. With several stages a worker it is one
        stage's activations, so divide by `chunks` to compare with schedules of whole stages.

        Raises:
            ScheduleError: the schedule does not exist for these numbers.
        """
        table = self.table(num_stages, num_microbatches)
        last = table.kinds[-1]
        most = []
        for row in table.rows:
            held = peak = 0
            for task in row:
                # Where there is no backward an activation is handed on and forgotten.
                held += (task.kind == "forward") - (task.kind == last)
                peak = max(peak, held, int(task.kind == "forward"))
            most.append(peak)
        return tuple(most)


class ScheduleByNumbers(Schedule):
    """A schedule that exists for all positive numbers, or for numbers of stages that `stages_multiple` divides."""

    stages_multiple = 1

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Raises ScheduleError for other numbers; no table is made."""
        check_counts(self.name, num_stages, num_microbatches, self.stages_multiple)


def check_counts(name: str, num_stages: int, num_microbatches: int, stages_divisible_by: int = 1) -> None:
    """Raises ScheduleError unless both numbers are positive and the stages divide evenly."""
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name} was asked for with {num_stages} stages and {num_microbatches} microbatches",
            remedy="use at least one of each",
        )
    if num_stages % stages_divisible_by:
        lower = num_stages - num_stages % stages_divisible_by
        near = [n for n in (lower, lower + stages_divisible_by) if n > 0]
        raise ScheduleError(
            f"schedule {name} needs a number of stages that {stages_divisible_by} divides, not {num_stages}",
            remedy="use " + " or ".join(map(str, near)) + " stages, or another schedule (1f1b takes any number)",
        )
