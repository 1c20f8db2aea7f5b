"""`Deployment`: a lowered pipeline and its processes; `Replanner`: another one for another number of machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.worker_group import WorkerGroup
from autopar.runtime.transport.process_groups import ProcessGroups

#: Starts processes: (what each is told, number of devices of each, kind of worker of each) -> the processes.
Launcher: TypeAlias = Callable[[Sequence[Handshake], Sequence[int], Sequence[int]], WorkerGroup]
#: Number of nodes of each kind.
Nodes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ProcessLayout:
    """Processes of workers, and their devices.

    Args:
        groups: the processes of each worker.
        devices: number of devices of each process.
        kinds: kind of worker that each is of; all of the first where it is empty.
    """

    groups: ProcessGroups
    devices: tuple[int, ...]
    kinds: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Deployment:
    """A pipeline and the processes that carry it out.

    Args:
        source: the lowered pipeline.
        devices: number of devices of each process.
        hosts: for each worker the number of its processes; one each where there are none.
        nodes: number of nodes of each kind that it is made for; as many as there are processes where it is empty.
        plan: what it carries out, for whoever wants to know.
        kinds: see `ProcessLayout`.
    """

    source: Pipelined
    devices: tuple[int, ...]
    hosts: tuple[int, ...] = ()
    nodes: Nodes = ()
    plan: Any = None
    kinds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", (len(self.devices),))

    @property
    def layout(self) -> ProcessLayout:
        """The processes of its workers."""
        return ProcessLayout(ProcessGroups(self.hosts or (1,) * self.source.num_workers), self.devices, self.kinds)


@dataclass(frozen=True, eq=False)
class Replanner:
    """Plans again for fewer machines.

    Args:
        deploy: nodes -> the same step, planned for as many or fewer; its inputs and outputs are the same.
    """

    deploy: Callable[[Nodes], Deployment]
