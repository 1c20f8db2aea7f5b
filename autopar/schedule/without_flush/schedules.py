"""Schedules without a flush: the order of one full pipeline, with versions of weights (`VersionMap`).

Stages s = 0..p-1, microbatches k = 0, 1, ..; version n is the weights after n updates. Both passes of a microbatch read
the same version on a stage.

- "pipedream" (weight stashing; Narayanan et al., SOSP'19, section 3.3): an update after every backward pass; stage s
  reads ``max(k - (p - 1 - s), 0)``, the newest that it has, and holds p - s versions.
- "pipedream-vertical" (vertical sync): every stage reads what the first one does, ``max(k - (p - 1), 0)``, p versions.
- "2bw" (Narayanan et al., ICML'21, section 3.1): an update after m microbatches; ``max(k // m - 1, 0)``, 2 versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, final

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.one_f_one_b import warm_up_row
from autopar.schedule.table import Table
from autopar.schedule.without_flush.ampnet import is_ampnet

#: Passes of a stage in their order: ("F" or "B", microbatch).
Passes: TypeAlias = tuple[tuple[str, int], ...]

_EVERY = MappingProxyType({"pipedream": False, "pipedream-vertical": False, "2bw": True})

#: Names of the version maps.
VERSION_MAPS = tuple(_EVERY)


@dataclass(frozen=True)
class VersionMap:
    """Version of the weights that each pass reads.

    Args:
        name: one of `VERSION_MAPS`.
        stages: p.
        microbatches: m, between two updates of "2bw"; the others update after each.
    """

    name: str
    stages: int
    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.name not in VERSION_MAPS:
            raise ScheduleError(f"{self.name!r} is not a version map", remedy=f"one of {', '.join(VERSION_MAPS)}")
        if self.stages < 1 or self.microbatches < 1:
            raise ScheduleError(
                f"{self.stages} stages, {self.microbatches} microbatches", remedy="at least one of each"
            )
        if _EVERY[self.name] and self.microbatches < self.stages:
            raise ScheduleError(
                f"{self.microbatches} microbatches for {self.stages} stages: the version to read would not be there",
                remedy=f"use at least {self.stages} microbatches between updates",
            )

    @property
    def update_every(self) -> int:
        """Backward passes of a stage between two of its updates."""
        return self.microbatches if _EVERY[self.name] else 1

    def reads(self, stage: int, microbatch: int) -> int:
        """The version that both passes of a microbatch read on a stage."""
        if self.name == "2bw":
            return max(microbatch // self.microbatches - 1, 0)
        lag = self.stages - 1 - (stage if self.name == "pipedream" else 0)
        return max(microbatch - lag, 0)

    def most_versions(self, stage: int) -> int:
        """The most versions that a stage holds at once, the newest among them."""
        if self.name == "2bw":
            return 2
        return self.stages - (stage if self.name == "pipedream" else 0)


class _WithoutFlush(Schedule):
    """The rows of 1F1B; `autopar.schedule.without_flush.lists` orders one call after another without an end between."""

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. The table exists for two stages and more."""
        check_counts(self.name, num_stages, num_microbatches)
        VersionMap(self.name, num_stages, num_microbatches)
        rows = tuple(warm_up_row(s, num_microbatches, num_stages - s) for s in range(num_stages))
        return Table(self.name, num_stages, num_microbatches, rows)


@final
class PipeDream(_WithoutFlush):
    """Weight stashing: an update after every microbatch; stage s holds p - s versions.

    Narayanan et al. (SOSP'19), section 3.3. No bubble once the pipeline is full.
    """

    name = "pipedream"


@final
class PipeDreamVertical(_WithoutFlush):
    """Vertical sync: as `PipeDream`, and every stage reads the version that the first one does; p versions each."""

    name = "pipedream-vertical"


@final
class TwoBuffered(_WithoutFlush):
    """PipeDream-2BW: an update a batch with gradients of the weights before the last update; 2 versions.

    Narayanan et al. (ICML'21), section 3.1. Needs as many microbatches as stages.
    """

    name = "2bw"


def flushes(schedule: object) -> bool:
    """Whether a schedule, or one of that name, ends every step with nothing under way."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    return not (isinstance(name, str) and name.lower().replace("_", "-") in VERSION_MAPS)


def no_flush_text(schedule: str) -> str:
    """Sentence on why a schedule without a flush cannot run where an update takes a value of several stages."""
    return f"schedule {schedule} has no moment at which all stages are through"


def updates_stagewise(schedule: object) -> bool:
    """Whether stages update each for itself in a schedule, or one of that name: those without a flush, and AMPNet."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    return not flushes(name) or (isinstance(name, str) and is_ampnet(name.replace("_", "-")))


def check_flush(schedule: str, where: str) -> None:
    """Raises ScheduleError where a schedule whose stages update each for itself is to run where only others do.

    Args:
        schedule: its name.
        where: the place.
    """
    if updates_stagewise(schedule):
        raise ScheduleError(
            f"schedule {schedule} does not run {where}",
            remedy='run it in one process, or schedule="1f1b"; autopar.transforms.delayed is "2bw" on any plan',
        )
