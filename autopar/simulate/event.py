"""`Event`: one work or transfer of a timeline with its start and end; samples of memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.plan.pipeline import WorkKind
from autopar.schedule import NONE

#: For one worker the bytes a device from each time on, in order of time; the first counts from the beginning.
Memory: TypeAlias = tuple[tuple[float, int], ...]


@dataclass(frozen=True, order=True)
class Event:
    """Something that took time on a worker.

    Args:
        start_s: seconds from the beginning of the step.
        end_s: when it was over.
        worker: who did it; of a transfer the sender.
        kind: the kind of work, or "send".
        stage: stage of the work; `NONE` for transfers.
        microbatch: its microbatch, or `NONE`.
        name: for people: the work, or the value that was sent.
        target: worker that a transfer went to, else `NONE`.
        bytes: bytes a device that were sent.
    """

    start_s: float
    end_s: float
    worker: int
    kind: WorkKind | Literal["send"]
    stage: int = NONE
    microbatch: int = NONE
    name: str = ""
    target: int = NONE
    bytes: int = 0

    @property
    def computes(self) -> bool:
        """Whether it kept the compute lane busy; transfers run in parallel with it."""
        return self.kind != "send"


def shown_range(events: Sequence[Event]) -> tuple[float, float]:
    """Seconds at which the first event begins and the last one ends; 0 and 0 without events."""
    return min((e.start_s for e in events), default=0), max((e.end_s for e in events), default=0)
