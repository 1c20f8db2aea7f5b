"""Seconds of collectives on nodes of several devices: rings, trees, two levels, and switches that sum.

Inside a node: the ring of `autopar.cost.collectives`, or the switch for an all-reduce of the whole node. Across nodes:
the bytes of a ring over the link between nodes, which the groups of a node share, with the latency of the ring or, for
an all-reduce, of a tree over nodes, whichever is less; or two levels, where each node first reduces inside.

Latency and transfer add up for very small and very large messages, whose protocols have the least latency and the most
bandwidth; between them ``ramp`` times the lesser of the two is lost.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from autopar.cluster import Link, Span
from autopar.cost.collectives import collective_on_link_s, wire_bytes
from autopar.cost.sends import lane_bandwidth


class NetworkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of collectives on any network of nodes.

    Args:
        level_s: seconds that each level of a tree over nodes adds, once up and once down, to the link's latency.
        ramp: what is lost where latency and transfer are equal, as a fraction of the lesser.
    """

    level_s: Annotated[float, msgspec.Meta(ge=0)]
    ramp: Annotated[float, msgspec.Meta(ge=0)]

    def both_s(self, latency_s: float, transfer_s: float) -> float:
        """Seconds of a collective with this latency and transfer."""
        return latency_s + transfer_s + self.ramp * min(latency_s, transfer_s)

    def collective_s(self, kind: str, full_bytes: float, span: Span) -> float:
        """Seconds of a collective that all groups of one kind run at once.

        Args:
            kind: one of `autopar.cost.collectives.KINDS`.
            full_bytes: bytes of the full tensor as one group sees it.
            span: where a group lies.
        """
        ranks = span.nodes * span.inside
        if ranks == 1 or full_bytes == 0:
            return 0.0
        if span.nodes == 1:
            return self._inside_s(kind, full_bytes, span)
        intra, nodes = span.intra, span.nodes
        lane = lane_bandwidth(span.inter, span.senders)
        reached = intra.group_bandwidth(span.inside) * intra.efficiency
        rounds = 2 if kind == "all-reduce" else 1
        latency_s = rounds * ((nodes - 1) * span.inter.latency_s + (ranks - nodes) * intra.latency_s)
        if kind == "all-reduce":
            level_s = span.inter.latency_s + self.level_s
            latency_s = min(latency_s, rounds * (math.log2(nodes) * level_s + (span.inside - 1) * intra.latency_s))
        flat_s = self.both_s(latency_s, wire_bytes(kind, full_bytes, ranks) / min(span.inside * lane, reached))
        if span.inside == 1 or kind in ("all-to-all", "collective-permute", "send"):
            return flat_s
        across_s = wire_bytes(kind, full_bytes / span.inside, nodes) / lane
        return min(flat_s, self.both_s(latency_s, across_s + wire_bytes(kind, full_bytes, span.inside) / reached))

    def _inside_s(self, kind: str, full_bytes: float, span: Span) -> float:
        """Seconds of a collective inside a node."""
        intra = span.intra
        link = Link(intra.group_bandwidth(span.inside) * intra.efficiency, intra.latency_s)
        latency_s = collective_on_link_s(kind, 0.0, span.inside, link)
        ring_s = self.both_s(latency_s, collective_on_link_s(kind, full_bytes, span.inside, link) - latency_s)
        if kind != "all-reduce" or intra.switch_share is None or not span.whole:
            return ring_s
        return min(ring_s, self.both_s(latency_s, full_bytes / (intra.bandwidth * intra.switch_share)))
