"""`Deployment`: a lowered pipeline and its processes; `Function`: one signature of a function, for the nodes there are.

`Replanner` plans a pipeline for another number of machines. Who starts the processes is `autopar.runtime.ray.connect`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.errors import ClusterError
from autopar.lower.pipeline.exported import ExportedProgram
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
        kinds: kind of machine of each worker; all of the first where it is empty.
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


class Function:
    """A decorated function on Ray workers: its plan and programs for each number of nodes.

    Args:
        number: index of the function in its cluster.
        deployment: plan and programs for all nodes of the cluster.
        replanner: plans for fewer nodes when some are lost; None where the function has one deployment.
        platform: kind of the workers' devices.
        x64: whether 64-bit types are enabled.
        progress: told what is being done.
    """

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        replanner: weakref.ref[Replanner] | None,
        platform: str,
        x64: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.number = number
        self.x64 = x64
        self.progress = progress
        self.deployment = deployment
        self._replanner = replanner
        self._platform = platform
        self._by_nodes = {deployment.nodes: deployment}
        self._exported: dict[Nodes, tuple[ExportedProgram, ...]] = {}

    @property
    def source(self) -> Pipelined:
        """The lowered pipeline that runs now."""
        return self.deployment.source

    @property
    def nodes(self) -> Nodes:
        """Number of nodes of each kind that it is meant for."""
        return next(iter(self._by_nodes))

    def fit(self, nodes: Nodes | None) -> None:
        """Takes the deployment for ``nodes`` nodes, or for all where that is None.

        Raises:
            ClusterError: there is none for so few.
        """
        wanted = self.nodes if nodes is None else self.at_most(nodes)
        if not any(wanted):
            raise ClusterError(
                "no machine is left to run on",
                cause="all were lost, and none came back in the time that start_s gives",
                remedy="add some and call again: copies of the arrays are kept; or restore the last checkpoint",
            )
        if wanted not in self._by_nodes:
            replanner = None if self._replanner is None else self._replanner()
            if replanner is None:
                wanted = self.nodes
            else:
                self.progress(f"{sum(wanted)} of {sum(self.nodes)} nodes are left; planning for them")
                self._by_nodes[wanted] = replanner.deploy(wanted)
        self.deployment = self._by_nodes[wanted]

    def at_most(self, nodes: Nodes) -> Nodes:
        """The nodes among the existing ones that it can use."""
        return tuple(min(have, want) for have, want in zip(nodes, self.nodes, strict=True))

    @property
    def exported(self) -> tuple[ExportedProgram, ...]:
        """Programs of the deployment that runs now, as bytes."""
        nodes = self.deployment.nodes
        key = next(n for n, d in self._by_nodes.items() if d is self.deployment)
        if key not in self._exported:
            self.progress(f"exporting {len(self.source.programs)} programs for {sum(nodes)} nodes")
            self._exported[key] = self.source.exported(self._platform)
        return self._exported[key]
