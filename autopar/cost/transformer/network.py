"""Collectives of ranks that are spread evenly over nodes, with the links that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster, Link, LinkSpec
from autopar.cost.collectives import collective_on_link_s, wire_bytes
from autopar.cost.sends import lane_bandwidth, lane_s
from autopar.cost.transformer.constants import NetworkConstants


@dataclass(frozen=True)
class Network:
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
    constants: NetworkConstants

    @staticmethod
    def of(cluster: Cluster, constants: NetworkConstants) -> Network:
        """The network of a cluster's first group."""
        group = cluster.groups[0]
        if isinstance(group.inter, LinkSpec):
            return Network(group.devices_per_node, group.intra, group.inter, constants)
        return Network(group.size, group.intra, group.intra, constants)

    def ranks_in_node(self, ranks: int, stride: int) -> int:
        """How many of ``ranks`` devices, ``stride`` apart, are in one node."""
        return min(ranks, max(1, self.devices_per_node // stride))

    def collective_s(self, kind: str, full_bytes: float, ranks: int, stride: int, sharing: int | None = None) -> float:
        """Seconds of a collective that all groups of ``ranks`` devices, ``stride`` apart, run at once.

        Inside a node: the ring of `autopar.cost.collectives`, or the switch for an all-reduce of the whole node.
        Across nodes: the bytes of a ring over the link between nodes, which the groups of a node share, with the
        latency of the ring or, for an all-reduce, of a tree over nodes, whichever is less; or two levels, where
        each node first reduces inside.

        Args:
            kind: one of `autopar.cost.collectives.KINDS`.
            full_bytes: bytes of the full tensor.
            ranks: devices of a group; 1 costs nothing.
            stride: distance between neighbours of a group, in device numbers.
            sharing: devices of a node that are in such a group, where they are not all.
        """
        senders = min(sharing or self.devices_per_node, self.devices_per_node)
        if ranks == 1 or full_bytes == 0:
            return 0.0
        inside = self.ranks_in_node(ranks, stride)
        if inside == ranks:
            return self._inside_s(kind, full_bytes, ranks)
        nodes = math.ceil(ranks / inside)
        bandwidth = min(self._bandwidth_between(inside, senders), self.intra.bandwidth * self.intra.efficiency)
        rounds = 2 if kind == "all-reduce" else 1
        latency_s = rounds * ((nodes - 1) * self.inter.latency_s + (ranks - nodes) * self.intra.latency_s)
        if kind == "all-reduce":
            level_s = self.inter.latency_s + self.constants.level_s
            latency_s = min(latency_s, rounds * (math.log2(nodes) * level_s + (inside - 1) * self.intra.latency_s))
        flat_s = self._both_s(latency_s, wire_bytes(kind, full_bytes, ranks) / bandwidth)
        if inside == 1 or kind in ("all-to-all", "collective-permute", "send"):
            return flat_s
        across_s = wire_bytes(kind, full_bytes / inside, nodes) / self._bandwidth_between(1, senders) + wire_bytes(
            kind, full_bytes, inside
        ) / (self.intra.bandwidth * self.intra.efficiency)
        return min(flat_s, self._both_s(latency_s, across_s))

    def _inside_s(self, kind: str, full_bytes: float, ranks: int) -> float:
        """Seconds of a collective inside a node."""
        link = _link(self.intra)
        latency_s = collective_on_link_s(kind, 0.0, ranks, link)
        ring_s = self._both_s(latency_s, collective_on_link_s(kind, full_bytes, ranks, link) - latency_s)
        if kind != "all-reduce" or self.intra.switch_share is None or ranks < self.devices_per_node:
            return ring_s
        return min(ring_s, self._both_s(latency_s, full_bytes / (self.intra.bandwidth * self.intra.switch_share)))

    def _both_s(self, latency_s: float, transfer_s: float) -> float:
        """Seconds of a collective with this latency and transfer.

        They add up for very small and very large messages, whose protocols have the least latency and the most
        bandwidth; between them ``ramp`` times the lesser is lost.
        """
        return latency_s + transfer_s + self.constants.ramp * min(latency_s, transfer_s)

    def send_s(self, bytes: float, stride: int, senders: int) -> float:
        """Seconds to send ``bytes`` from each device to one ``stride`` away.

        Args:
            bytes: bytes of each sender.
            stride: distance in device numbers; a node or more crosses the link between nodes.
            senders: devices of a node that send at the same time.
        """
        inside = stride < self.devices_per_node
        return lane_s(bytes, self.intra) if inside else lane_s(bytes, self.inter, senders)

    def _bandwidth_between(self, inside: int, senders: int) -> float:
        """Bytes/s of a ring that has ``inside`` of a node's ``senders``: it enters and leaves by all their cards."""
        return inside * lane_bandwidth(self.inter, senders)


def _link(spec: LinkSpec) -> Link:
    return Link(spec.bandwidth * spec.efficiency, spec.latency_s)
