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
    """Which version each pass reads.

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
            raise ScheduleError(f"{self.name!r} is no version map", remedy=f"one of {', '.join(VERSION_MAPS)}")
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


def asynchronous_1f1b(stages: int, count: int) -> tuple[Passes, ...]:
    """Passes of every stage for ``count`` microbatches in one run of 1F1B that no update interrupts.

    Args:
        stages: p.
        count: microbatches, over all updates.
    """
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, count)
        passes = [("F", k) for k in range(ahead)]
        for k in range(count):
            if ahead + k < count:
                passes.append(("F", ahead + k))
            passes.append(("B", k))
        lists.append(tuple(passes))
    return tuple(lists)


@dataclass(frozen=True)
class Audit:
    """What a stage's list of passes says of versions.

    Args:
        newest: by microbatch the newest version when its forward pass begins.
        most_versions: the most versions at once that some pass to come reads, the newest among them.
    """

    newest: tuple[int, ...]
    most_versions: int


def audit(versions: VersionMap, stage: int, passes: Passes) -> Audit:
    """Follows a stage's passes and updates.

    A version is born by an update (the first is there) and dies after the last pass that reads it; the newest lives.

    Args:
        versions: what each pass reads.
        stage: its number.
        passes: its list.

    Raises:
        ScheduleError: a pass reads a version that is not born yet, or a backward pass comes before its forward pass.
    """
    last: dict[int, int] = {}
    for index, (_, k) in enumerate(passes):
        last[versions.reads(stage, k)] = index
    newest, done, most_versions = 0, 0, 1
    begun: dict[int, int] = {}
    for index, (kind, k) in enumerate(passes):
        version = versions.reads(stage, k)
        if version > newest or (kind == "B" and k not in begun):
            raise ScheduleError(f"{kind}{stage}.{k} reads version {version}; stage {stage} is at version {newest}")
        if kind == "F":
            begun[k] = newest
        live = {v for v, end in last.items() if v <= newest and end >= index} | {newest}
        most_versions = max(most_versions, len(live))
        done += kind == "B"
        if kind == "B" and done % versions.update_every == 0:
            newest += 1
    return Audit(tuple(begun[k] for k in sorted(begun)), most_versions)
