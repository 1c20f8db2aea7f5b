"""`Function`: one signature of a function on workers: what runs where, for the nodes that there are."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from autopar.errors import ClusterError
from autopar.lower.pipeline.exported import ExportedProgram
from autopar.runtime.ray.deployment import Deployment, Nodes, Replanner
from autopar.runtime.ray.source import Pipelined


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
