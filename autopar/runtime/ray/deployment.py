"""`Deployment`: a lowered pipeline and the processes for it; `Spare`: another one when machines are lost for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.runtime.ray.crew import Crew
from autopar.runtime.ray.messages import Hello
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.transport.teams import Teams


@dataclass(frozen=True, eq=False)
class Deployment:
    """A pipeline and the processes that carry it out.

    Args:
        source: the lowered pipeline.
        start: makes processes.
        hosts: for each worker the number of its processes; one each where there are none.
        nodes: number of nodes that it wants; as many as there are processes where it is 0.
        plan: what it carries out, for whoever wants to know.
    """

    source: Pipelined
    start: Callable[[Sequence[Hello]], Crew]
    hosts: tuple[int, ...] = ()
    nodes: int = 0
    plan: Any = None

    @property
    def teams(self) -> Teams:
        """The processes of its workers."""
        return Teams(self.hosts or (1,) * self.source.num_workers)


@dataclass(frozen=True, eq=False)
class Spare:
    """What to do with fewer machines than there were.

    Args:
        room: how many nodes there are now.
        deploy: number of nodes -> the same step, planned for as many or fewer; its inputs and outputs are the same.
    """

    room: Callable[[], int]
    deploy: Callable[[int], Deployment]
