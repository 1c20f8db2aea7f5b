"""`CostModel`: the costs of a cluster, bundled for the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost.collectives import all_reduce_tree_s, collective_s
from autopar.cost.compute import roofline_s


@dataclass(frozen=True)
class CostModel:
    """Seconds of operators and collectives on a cluster.

    Args:
        cluster: the cluster; where its devices differ an operator takes as long as on the slowest, since the
            devices of a mesh wait for each other.
        launch_s: seconds that starting an operator costs, instead of the devices' own ``launch_s``.
        all_reduce: "ring", or "best": the faster of ring and tree, as NCCL chooses; they differ where many
            devices reduce few bytes.
    """

    cluster: Cluster
    launch_s: float | None = None
    all_reduce: Literal["ring", "best"] = "ring"

    def collective_s(self, kind: str, full_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh) -> float:
        """Seconds of a collective over ``axes`` of ``mesh``; see `autopar.cost.collectives.collective_s`."""
        ring_s = collective_s(kind, full_bytes, axes, mesh)
        if kind != "all-reduce" or self.all_reduce == "ring":
            return ring_s
        return min(ring_s, all_reduce_tree_s(full_bytes, mesh.group_size(axes), mesh.link(axes)))

    def operator_s(self, flops: float, bytes: float, dtype: str) -> float:
        """Seconds of one operator's share on one device: launch and roofline.

        Args:
            flops: FLOPs that one device does.
            bytes: bytes that one device reads and writes.
            dtype: jaxpr name of the dtype that it computes in, as ``bf16``.

        Returns:
            0 for an operator that neither computes nor moves anything.
        """
        if not flops and not bytes:
            return 0.0
        return max(
            (d.launch_s if self.launch_s is None else self.launch_s) + roofline_s(flops, bytes, dtype, d)
            for d in self.cluster.device_types
        )

    def host_s(self, bytes: float) -> float:
        """Seconds of moving what one device holds to the memory of its host, or back: launch and the host's link.

        Args:
            bytes: bytes that one device moves; all devices move as many at the same time.

        Returns:
            0 for no bytes; inf where some nodes of the cluster have no ``host_bandwidth``.
        """
        if not bytes:
            return 0.0
        return max(
            (g.device.launch_s if self.launch_s is None else self.launch_s) + bytes / g.host_bandwidth
            if g.host_bandwidth is not None
            else math.inf
            for g in self.cluster.groups
        )
