"""Schedules without a flush: the order of one full pipeline, with versions of weights."""

from __future__ import annotations

from typing import final

from autopar.errors import ScheduleError
from autopar.schedule.ampnet import is_ampnet
from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.one_f_one_b import warm_up_row
from autopar.schedule.table import Table
from autopar.schedule.versions import VERSION_MAPS, VersionMap


class _WithoutFlush(Schedule):
    """The rows of 1F1B; `autopar.schedule.stale` orders calls behind each other without an end between them."""

    @property
    def name(self) -> str:
        """The name of its version map."""
        raise NotImplementedError

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """See `Schedule.table`; exists for two stages and more."""
        check_counts(self.name, num_stages, num_microbatches)
        VersionMap(self.name, num_stages, num_microbatches)
        rows = tuple(warm_up_row(s, num_microbatches, num_stages - s) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)


@final
class PipeDream(_WithoutFlush):
    """Weight stashing: an update after every microbatch; stage s holds p - s versions.

    Narayanan et al. (SOSP'19), section 3.3. No bubble once the pipeline is full.
    """

    @property
    def name(self) -> str:
        """Name of the schedule: ``pipedream``."""
        return "pipedream"


@final
class PipeDreamVertical(_WithoutFlush):
    """Vertical sync: as `PipeDream`, and every stage reads the version that the first one does; p versions each."""

    @property
    def name(self) -> str:
        """Name of the schedule: ``pipedream-vertical``."""
        return "pipedream-vertical"


@final
class TwoBuffered(_WithoutFlush):
    """PipeDream-2BW: an update a batch with gradients of the weights before the last update; 2 versions.

    Narayanan et al. (ICML'21), section 3.1. Needs as many microbatches as stages.
    """

    @property
    def name(self) -> str:
        """Name of the schedule: ``2bw``."""
        return "2bw"


def flushes(schedule: object) -> bool:
    """Whether a schedule, or one of that name, ends every step with nothing under way."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    return not (isinstance(name, str) and name.lower().replace("_", "-") in VERSION_MAPS)


def without_a_moment(schedule: str) -> str:
    """The lack of a schedule without a flush where an update takes a value of several stages."""
    return f"schedule {schedule} has no moment at which all stages are through"


def updates_apart(schedule: object) -> bool:
    """Whether stages update each for itself in a schedule, or one of that name: those without a flush, and AMPNet."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    return not flushes(name) or (isinstance(name, str) and is_ampnet(name.replace("_", "-")))


def check_flush(schedule: str, where: str) -> None:
    """Raises ScheduleError where a schedule whose stages update each for itself is to run where only others do.

    Args:
        schedule: its name.
        where: the place.
    """
    if updates_apart(schedule):
        raise ScheduleError(
            f"schedule {schedule} does not run {where}",
            remedy='run it in one process, or schedule="1f1b"; autopar.transforms.delayed is "2bw" on any plan',
        )
