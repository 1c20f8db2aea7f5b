"""Seconds of sending a value from some devices to others.

A value of M bytes that leaves over L lanes (the fewer of senders and receivers) sends M / L bytes from each of L
devices at once. A lane inside a node takes the link inside the node. A lane between nodes has its own bandwidth or a
share of the card of either node, whichever is less:

    inside     alpha + (M / L) / (b x efficiency)
    between    alpha + (M / L) / (min(b, B / lanes of the node) x efficiency)

The slowest lane decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autopar.cluster import Cluster, LinkSpec


def lane_bandwidth(link: LinkSpec, lanes: int = 1) -> float:
    """Bytes/s that each of ``lanes`` devices of a node reaches over ``link`` when all of them send at once."""
    shared = math.inf if link.node_bandwidth is None else link.node_bandwidth / lanes
    return min(link.group_bandwidth(2), shared) * link.efficiency


def lane_s(nbytes: float, link: LinkSpec, lanes: int = 1) -> float:
    """Seconds in which each of ``lanes`` devices of a node sends ``nbytes`` over ``link``."""
    return link.latency_s + nbytes / lane_bandwidth(link, lanes)


def send_s(cluster: Cluster, nbytes: float, source: Sequence[int], target: Sequence[int]) -> float:
    """Seconds of sending a value from the devices ``source`` to the devices ``target``, each lane with its share.

    Args:
        cluster: where they are; its node groups may differ in size and links.
        nbytes: bytes of the whole value.
        source: numbers of the devices that have it, each a share.
        target: numbers of the devices that take it, each a share.
    """
    lanes = min(len(source), len(target))
    pairs = list(zip(_spread(source, lanes), _spread(target, lanes), strict=True))
    places = cluster.places
    outward = [(places[a], places[b]) for a, b in pairs if places[a].node != places[b].node]
    out, into = Counter(a.node for a, _ in outward), Counter(b.node for _, b in outward)
    inside = {places[a].intra for a, b in pairs if places[a].node == places[b].node}
    seconds = [lane_s(nbytes / lanes, link) for link in inside]
    for one, sending, other, taking in {(a.inter, out[a.node], b.inter, into[b.node]) for a, b in outward}:
        rates = (lane_bandwidth(one, sending), lane_bandwidth(other, taking))
        seconds.append(max(one.latency_s, other.latency_s) + nbytes / lanes / min(rates))
    return max(seconds)


def send_line(cluster: Cluster, source: Sequence[int], target: Sequence[int]) -> tuple[float, float]:
    """Seconds of `send_s` without bytes, and those of each byte besides, between two sets of devices.

    Args:
        cluster: where they are.
        source: numbers of the devices that send.
        target: numbers of the devices that receive.
    """
    begins_s, many = send_s(cluster, 0.0, source, target), 1e9
    return begins_s, (send_s(cluster, many, source, target) - begins_s) / many


def least_latency_s(cluster: Cluster) -> float:
    """Seconds that `send_s` takes at least, whatever is sent between whichever devices.

    Args:
        cluster: where they are.
    """
    between = [g.inter for g in cluster.groups if cluster.num_nodes > 1 and isinstance(g.inter, LinkSpec)]
    return min(link.latency_s for link in (*between, *(g.intra for g in cluster.groups)))


def _spread(devices: Sequence[int], count: int) -> list[int]:
    """``count`` of ``devices``, evenly."""
    return [devices[i * len(devices) // count] for i in range(count)]
