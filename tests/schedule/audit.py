"""Lists of passes of pipelines without a flush, followed version by version."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.schedule.without_flush.schedules import Passes, VersionMap


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
