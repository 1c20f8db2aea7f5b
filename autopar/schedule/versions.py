"""Versions of weights in pipelines without a flush: which one each pass reads, and how many a stage holds.

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
from typing import TypeAlias

from autopar.errors import ScheduleError

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
        behind = self.stages - 1 - (stage if self.name == "pipedream" else 0)
        return max(microbatch - behind, 0)

    def most_versions(self, stage: int) -> int:
        """The most versions that a stage holds at once, the newest among them."""
        if self.name == "2bw":
            return 2
        return self.stages - (stage if self.name == "pipedream" else 0)
