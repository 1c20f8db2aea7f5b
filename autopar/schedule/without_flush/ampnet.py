"""AMPNet: stages take what has arrived and update on their own; see `autopar.runtime.ampnet`.

A microbatch is a key. At most ``max_active_keys`` (a) of them are between their first forward and their last backward
pass. A stage prefers backward passes and updates after every ``min_update_frequency`` (u) of them; the backward pass
reads what weights are there then. Keys never overtake each other, so that between the two passes of a key at most a - 1
others come back: its gradient is at most ``ceil((a - 1) / u)`` updates old on every stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from autopar.errors import ScheduleError
from autopar.schedule.base import Schedule, check_counts
from autopar.schedule.dataflow import Dataflow, Work, WorkSpec
from autopar.schedule.one_f_one_b import warm_up_row
from autopar.schedule.table import Table

_NAME = re.compile(r"ampnet(?:-k(\d+))?(?:-u(\d+))?")


@final
class AmpNet(Schedule):
    """Workers with queues that update on arrival (Gaunt et al., AMPNet, 2017, arXiv 1705.09786, section 3).

    Workers decide the order at run time. The static table assumes that all passes take equally long.

    Args:
        max_active_keys: microbatches under way at once; None: as many as stages. 1 is one after the other.
        min_update_frequency: backward passes of a stage between two of its updates; divides the microbatches.

    Raises:
        ScheduleError: one of them is less than 1.
    """

    def __init__(self, max_active_keys: int | None = None, min_update_frequency: int = 1) -> None:
        if min_update_frequency < 1 or (max_active_keys is not None and max_active_keys < 1):
            raise ScheduleError(
                f"schedule ampnet with max_active_keys={max_active_keys}, min_update_frequency={min_update_frequency}",
                remedy="use at least one of each",
            )
        self._active, self._every = max_active_keys, min_update_frequency

    @property
    def name(self) -> str:
        """``ampnet``, with ``-k`` and ``-u`` and the numbers that are not the usual ones."""
        active = "" if self._active is None else f"-k{self._active}"
        return f"ampnet{active}" + (f"-u{self._every}" if self._every > 1 else "")

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Tasks of each worker, in order. ``min_update_frequency`` has to divide the number of microbatches."""
        check_counts(self.name, num_stages, num_microbatches)
        if num_microbatches % self._every:
            raise ScheduleError(
                f"schedule ampnet updates after {self._every} microbatches, which does not divide {num_microbatches}",
                remedy=f"use min_update_frequency={math.gcd(self._every, num_microbatches)}",
            )
        active = num_stages if self._active is None else self._active
        ahead = [min(active, max(num_stages, active) - s) for s in range(num_stages)]
        rows = tuple(warm_up_row(s, num_microbatches, n) for s, n in enumerate(ahead))
        return Table(self.name, num_stages, num_microbatches, rows)


def is_ampnet(name: str) -> bool:
    """Whether a schedule of this name is `AmpNet`."""
    return _NAME.fullmatch(name.lower()) is not None


@dataclass(frozen=True)
class AmpFlow:
    """Flow of AMPNet; stage s is on worker s.

    Args:
        dataflow: its works; the update has the parts of `autopar.schedule.without_flush.lists`.
        microbatches: keys of a call.
        replaces: by value that the update writes the input that it is the next of.
        most_active: keys under way at once.
        update_every: backward passes of a stage between two updates.
        stages: their number.
    """

    dataflow: Dataflow
    microbatches: int
    replaces: Mapping[str, str]
    most_active: int
    update_every: int
    stages: int

    @staticmethod
    def of(name: str, stages: int, microbatches: int, dataflow: Dataflow, replaces: Mapping[str, str]) -> AmpFlow:
        """The flow of the schedule called ``name``. Raises ScheduleError where it is not AMPNet."""
        active, every = numbers_of(name, stages)
        return AmpFlow(dataflow, microbatches, replaces, active, every, stages)

    @property
    def most_stale(self) -> int:
        """Updates of a stage between the two passes of a key, at most."""
        return math.ceil((self.most_active - 1) / self.update_every)

    def received(self, kind: str, stage: int) -> tuple[str, ...]:
        """Values of a microbatch that a pass of a stage takes of other stages."""
        spec, writers = self.spec(kind, stage), self.dataflow.writers
        return () if spec is None else tuple(n for n in spec.reads if n in writers and writers[n].stage != stage)

    def spec(self, kind: str, stage: int, part: int = 0) -> WorkSpec | None:
        """A work that reads or writes something; None where there is none."""
        return self.dataflow.by_work.get(Work(kind, stage, part))  # type: ignore[arg-type]


def numbers_of(name: str, stages: int) -> tuple[int, int]:
    """(keys under way at once, backward passes between two updates) of AMPNet's name on so many stages."""
    match = _NAME.fullmatch(name.lower())
    if match is None:
        raise ScheduleError(f"{name} is not AMPNet")
    active, every = match.groups()
    return int(active or stages), int(every or 1)
