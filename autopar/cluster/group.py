"""`NodeGroup`: equal nodes, with `LinkSpec` for what connects devices inside and between them.

`MeasuredCollective` holds seconds of one kind of collective that were measured on groups of devices of a node. Prices
are made of these in `autopar.cost`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from autopar.cluster.checks import fraction, positive, text, whole
from autopar.cluster.device import Device
from autopar.errors import ClusterError


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """Measured seconds of one kind of collective, all groups of a node at once.

    Between two points the seconds are linear in the bytes, as latency and bandwidth make them. Fewer bytes than those
    of the first point take as long; more than those of the last one continue the line from the first to the last.

    Args:
        kind: as `autopar.cost.collectives.KINDS` names it.
        devices: of a group, 2 or more.
        seconds: (bytes of the full tensor as one group sees it, seconds), both rising; seconds may stay equal.

    Raises:
        ClusterError: a value is impossible; it names the field.
    """

    kind: str
    devices: int
    seconds: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", text("MeasuredCollective.kind", self.kind))
        if whole("MeasuredCollective.devices", self.devices) < 2:
            raise ClusterError(f"MeasuredCollective.devices is {self.devices}", remedy="give 2 or more")
        points = tuple((float(b), float(s)) for b, s in self.seconds)
        if not points:
            raise ClusterError("MeasuredCollective.seconds has no points", remedy="give [bytes, seconds]s")
        for bytes, seconds in points:
            positive("bytes of MeasuredCollective.seconds", bytes)
            positive("seconds of MeasuredCollective.seconds", seconds)
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in itertools.pairwise(points)):
            raise ClusterError(
                f"MeasuredCollective.seconds of {self.kind} must rise: {points}", remedy="sort its points by bytes"
            )
        object.__setattr__(self, "seconds", points)

    def at(self, bytes: float) -> float:
        """Seconds with so many bytes of the full tensor."""
        points = self.seconds
        i = bisect_right(points, bytes, key=lambda p: p[0])
        if i == 0:
            return points[0][1]
        (x0, y0), (x1, y1) = (points[i - 1], points[i]) if i < len(points) else (points[0], points[-1])
        if i < len(points):
            return y0 + (y1 - y0) * (bytes - x0) / (x1 - x0)
        return y1 + (bytes - x1) * ((y1 - y0) / (x1 - x0) if len(points) > 1 else y1 / x1)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The link between devices.

    Args:
        bandwidth: bytes/s in one direction that one device sends at most.
        latency_s: seconds of one message.
        efficiency: fraction of ``bandwidth`` (and of ``node_bandwidth``) that large collectives reach, in (0, 1].
        node_bandwidth: bytes/s in one direction that all devices of a node together send to other nodes; None:
            each of them has its own ``bandwidth``. Only for links between nodes.
        torus_dims: dims of the torus that the devices form, each with ``bandwidth`` of its own; 1 where they
            are connected by a switch. Only for links inside a node.
        switch_share: fraction of ``bandwidth`` at which the switch itself sums: an all-reduce of M bytes takes
            M / (bandwidth x switch_share). None where the switch cannot. Only for links inside a node.
        group_shares: where links join pairs of devices: (number of devices, the share of ``bandwidth`` that the links
            between so many neighbours are), by number; other groups reach what the next smaller one does, all devices
            of a node all of it. Empty where a switch joins all. Only for links inside a node.
        collectives: what was measured of collectives; other kinds take what latency and bandwidth say. Only for links
            inside a node.
        refill_bandwidth: bytes/s at which a device that waited for others gets back into its caches what it had there;
            None where no time is lost. Only for links inside a node.
        refill_bytes: bytes that it gets back at most; None for all. Only for links inside a node.

    Raises:
        ClusterError: a value is impossible; it names the field.
    """

    bandwidth: float
    latency_s: float
    efficiency: float = 1.0
    node_bandwidth: float | None = None
    torus_dims: int = 1
    switch_share: float | None = None
    group_shares: tuple[tuple[int, float], ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    refill_bandwidth: float | None = None
    refill_bytes: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", positive("LinkSpec.bandwidth", self.bandwidth))
        object.__setattr__(self, "latency_s", positive("LinkSpec.latency_s", self.latency_s, zero=True))
        object.__setattr__(self, "efficiency", fraction("LinkSpec.efficiency", self.efficiency))
        if self.node_bandwidth is not None:
            object.__setattr__(self, "node_bandwidth", positive("LinkSpec.node_bandwidth", self.node_bandwidth))
        object.__setattr__(self, "torus_dims", whole("LinkSpec.torus_dims", self.torus_dims))
        if self.switch_share is not None:
            object.__setattr__(self, "switch_share", fraction("LinkSpec.switch_share", self.switch_share))
        shares = sorted(self.group_shares)
        for count, share in shares:
            whole("LinkSpec.group_shares", count)
            fraction("LinkSpec.group_shares", share)
        object.__setattr__(self, "group_shares", tuple(shares))
        measured = sorted(self.collectives, key=lambda m: (m.kind, m.devices))
        if len({(m.kind, m.devices) for m in measured}) < len(measured):
            raise ClusterError("LinkSpec.collectives has a kind of one number of devices twice", remedy="give it once")
        object.__setattr__(self, "collectives", tuple(measured))
        for name in ("refill_bandwidth", "refill_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive(f"LinkSpec.{name}", getattr(self, name)))

    def group_bandwidth(self, count: int) -> float:
        """Bytes/s that each of ``count`` neighbours sends to the others of them at most."""
        shares = [share for devices, share in self.group_shares if devices <= count]
        return self.bandwidth * (shares[-1] if shares else 1.0)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``count`` equal nodes of ``devices_per_node`` equal devices.

    Args:
        count: number of nodes.
        devices_per_node: number of devices of each.
        device: what each of them is.
        intra: the link between devices of a node.
        inter: the link between nodes, or "intra": the link inside a node reaches all nodes of the group (a TPU
            slice), which then counts as one node.
        host_memory_bytes: bytes of a node's host memory, or None where unknown.
        host_bandwidth: bytes/s in one direction between one device and its host's memory, or None where unknown.
        slices: the link between TPU slices, each of them such a group with ``inter="intra"``; None where unknown.
        measured: when and on what its figures were measured, as `autopar calibrate` writes it; "" where they were not.
        device_dollars_per_hour: price of one device for an hour, or None where unknown; it decides nothing.

    Raises:
        ClusterError: a value is impossible; it names the field.
    """

    count: int
    devices_per_node: int
    device: Device
    intra: LinkSpec
    inter: LinkSpec | Literal["intra"]
    host_memory_bytes: int | None = None
    host_bandwidth: float | None = None
    slices: LinkSpec | None = None
    measured: str = ""
    device_dollars_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.device_dollars_per_hour is not None:
            price = positive("NodeGroup.device_dollars_per_hour", self.device_dollars_per_hour)
            object.__setattr__(self, "device_dollars_per_hour", price)
        object.__setattr__(self, "count", whole("NodeGroup.count", self.count))
        object.__setattr__(self, "devices_per_node", whole("NodeGroup.devices_per_node", self.devices_per_node))
        if not isinstance(self.inter, LinkSpec) and self.inter != "intra":
            raise ClusterError(f"NodeGroup.inter is {self.inter!r}", remedy='give a LinkSpec or "intra"')
        if self.host_memory_bytes is not None:
            object.__setattr__(self, "host_memory_bytes", whole("NodeGroup.host_memory_bytes", self.host_memory_bytes))
        if self.host_bandwidth is not None:
            object.__setattr__(self, "host_bandwidth", positive("NodeGroup.host_bandwidth", self.host_bandwidth))

    @property
    def is_network_slower(self) -> bool:
        """Whether a device sends less to other nodes than inside its own, where all send at once."""
        if not isinstance(self.inter, LinkSpec):
            return False
        share = math.inf if self.inter.node_bandwidth is None else self.inter.node_bandwidth / self.devices_per_node
        return min(self.inter.bandwidth, share) < self.intra.bandwidth

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.count * self.devices_per_node
