"""`Durations`: seconds of each work of a stage and of each transfer between workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.schedule import Dataflow, Kind, Table, Work, work_of


@dataclass(frozen=True)
class Durations:
    """Seconds of everything that takes time. Integers and fractions are kept as they are, so that sums are exact.

    Args:
        work_s: seconds of each work, once.
        transfer_s: seconds of sending one buffer, by (value, sending worker, receiving worker).
        other_transfer_s: seconds of every other transfer.
        host_s: seconds of moving one buffer to the host's memory or back, by value.
    """

    work_s: Mapping[Work, float]
    transfer_s: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    other_transfer_s: float = 0
    host_s: Mapping[str, float] = field(default_factory=dict)

    def of_work(self, work: Work) -> float:
        """Seconds of ``work``. ScheduleError where it has none."""
        seconds = self.work_s.get(work)
        if seconds is None:
            raise ScheduleError(f"it is not known how long {work} takes", remedy="give the seconds of every work")
        return seconds

    def of_transfer(self, value: str, source: int, target: int) -> float:
        """Seconds of sending one buffer of ``value``."""
        return self.transfer_s.get((value, source, target), self.other_transfer_s)

    def of_host(self, value: str) -> float:
        """Seconds of moving one buffer of ``value`` to the host, or back."""
        return self.host_s.get(value, 0)


def equal_stages(table: Table, dataflow: Dataflow, seconds: Mapping[Kind, float], transfer_s: float = 0) -> Durations:
    """All stages take the same time; what runs before and after the microbatches takes none.

    Args:
        table: the schedule.
        dataflow: its works.
        seconds: of one pass by kind.
        transfer_s: seconds of every transfer.
    """
    work_s: dict[Work, float] = {spec.work: 0 for spec in dataflow.works}
    work_s |= {work_of(t): seconds[t.kind] for row in table.rows for t in row}
    return Durations(work_s, {}, transfer_s)
