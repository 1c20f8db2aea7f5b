"""Collectives of ranks that are spread evenly over nodes, with the links that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster, LinkSpec, Span
from autopar.cost.network import NetworkRates
from autopar.cost.sends import lane_s


@dataclass(frozen=True)
class TransformerNetwork:
    """Seconds of collectives and sends on equal nodes.

    Args:
        devices_per_node: devices of each node.
        intra: the link inside a node.
        inter: the link between nodes.
        constants: what holds for all networks.
    """

    devices_per_node: int
    intra: LinkSpec
    inter: LinkSpec
    constants: NetworkRates

    @staticmethod
    def of(cluster: Cluster, constants: NetworkRates) -> TransformerNetwork:
        """The network of a cluster's first group."""
        group = cluster.groups[0]
        if isinstance(group.inter, LinkSpec):
            return TransformerNetwork(group.devices_per_node, group.intra, group.inter, constants)
        return TransformerNetwork(group.size, group.intra, group.intra, constants)

    def ranks_in_node(self, ranks: int, stride: int) -> int:
        """How many of ``ranks`` devices, ``stride`` apart, are in one node."""
        return min(ranks, max(1, self.devices_per_node // stride))

    def collective_s(self, kind: str, full_bytes: float, ranks: int, stride: int, sharing: int | None = None) -> float:
        """Seconds of a collective that all groups of ``ranks`` devices, ``stride`` apart, run at once.

        See `autopar.cost.network`, which prices collectives of plans as well.

        Args:
            kind: one of `autopar.cost.collectives.KINDS`.
            full_bytes: bytes of the full tensor.
            ranks: devices of a group; 1 costs nothing.
            stride: distance between neighbours of a group, in device numbers.
            sharing: devices of a node that are in such a group, where they are not all.
        """
        inside = self.ranks_in_node(ranks, stride)
        senders = min(sharing or self.devices_per_node, self.devices_per_node)
        nodes = math.ceil(ranks / inside)
        whole = nodes == 1 and ranks >= self.devices_per_node
        span = Span(nodes, inside, senders, whole, self.intra, self.inter)
        return self.constants.collective_s(kind, full_bytes, span)

    def send_s(self, bytes: float, stride: int, senders: int) -> float:
        """Seconds to send ``bytes`` from each device to one ``stride`` away.

        Args:
            bytes: bytes of each sender.
            stride: distance in device numbers; a node or more crosses the link between nodes.
            senders: devices of a node that send at the same time.
        """
        inside = stride < self.devices_per_node
        return lane_s(bytes, self.intra) if inside else lane_s(bytes, self.inter, senders)
