"""`Deployment`: a lowered pipeline and the processes for it; `Replanner`: another one when machines are lost for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.worker_group import WorkerGroup
from autopar.runtime.transport.process_groups import ProcessGroups


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
    start: Callable[[Sequence[Handshake]], WorkerGroup]
    hosts: tuple[int, ...] = ()
    nodes: int = 0
    plan: Any = None

    @property
    def groups(self) -> ProcessGroups:
        """The processes of its workers."""
        return ProcessGroups(self.hosts or (1,) * self.source.num_workers)


@dataclass(frozen=True, eq=False)
class Replanner:
    """What to do with fewer machines than there were.

    Args:
        room: how many nodes there are now.
        deploy: number of nodes -> the same step, planned for as many or fewer; its inputs and outputs are the same.
    """

    room: Callable[[], int]
    deploy: Callable[[int], Deployment]
