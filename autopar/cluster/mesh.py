"""`LogicalMesh`: the devices of a cluster in 1 or 2 named axes, each with the link that its collectives use.

`arrange` makes the mesh of a shape, `mesh_shapes` lists the shapes of a number of devices.

Devices are numbered node by node. In a mesh of shape (a, b) device i has the coordinates (i // b, i % b), so that the
last axis holds the nearest devices. A collective over some axes runs in groups of devices that differ in those
coordinates only, all groups at once.

Link of a group that lies inside a node: the link inside the node.

Link of a group that spans nodes, with c of its devices in a node and k groups in that node that span nodes (k =
devices of the node / c in a regular mesh). A ring enters and leaves each node once, so that a node's network card
carries one ring of each of the k groups in each direction; a ring's traffic is striped over the network connections of
the group's c devices. The slowest hop sets the pace:

    bandwidth = min(c * inter.bandwidth, inter.node_bandwidth / k, the c devices' intra bandwidth if c > 1)

times the links' efficiencies. So a one-axis mesh over all devices has the whole network of a node for its one ring,
and an axis of one device a node has a share of 1 / devices of a node. The latency is the mean over the hops of the
ring: in each node c - 1 hops inside and one to the next node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from autopar.cluster.group import LinkSpec, NodeGroup

#: Names of mesh axes, major first.
AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class Span:
    """Place of the devices of a collective's group, all groups being the same or this one the widest.

    Args:
        nodes: number of nodes that the group has devices in.
        inside: its devices in one of them.
        senders: devices of a node, of all groups that run at once.
        whole: the group is all devices of its nodes.
        intra: the link inside a node.
        inter: the link between nodes.
    """

    nodes: int
    inside: int
    senders: int
    whole: bool
    intra: LinkSpec
    inter: LinkSpec


@dataclass(frozen=True, slots=True)
class Link:
    """The links that a device can send over at once.

    Args:
        bandwidth: bytes/s a device in one direction, with all devices of the axis sending.
        latency_s: seconds of one message.
        span: where the devices of a group lie; None where nothing is known.
    """

    bandwidth: float
    latency_s: float
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LogicalMesh:
    """Named axes over devices, major first; the last axis is the one with the closest devices.

    Args:
        axes: (name, size) of each axis; sizes of 1 are allowed.
        links: the link of each axis, in the order of ``axes``.
        joint: (names in mesh order, link) of sets of several axes whose collectives together have a link of
            their own; for other sets it is the slowest of their links.
    """

    axes: tuple[tuple[str, int], ...]
    links: tuple[Link, ...]
    joint: tuple[tuple[tuple[str, ...], Link], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis name."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, major first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, major first."""
        return tuple(n for _, n in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(n for _, n in self.axes)

    def group_size(self, axes: tuple[str, ...]) -> int:
        """Number of devices of one group of a collective over ``axes``. KeyError if there is no such axis."""
        sizes = self.sizes
        return math.prod(sizes[a] for a in set(axes))

    def link(self, axes: tuple[str, ...]) -> Link:
        """The link that a collective over ``axes`` (one or several, taken together) is limited by."""
        spanned = [
            (name, link) for (name, n), link in zip(self.axes, self.links, strict=True) if name in axes and n > 1
        ]
        if not spanned:
            return Link(math.inf, 0.0)
        if len(spanned) == 1:
            return spanned[0][1]
        names = tuple(name for name, _ in spanned)
        for several, link in self.joint:
            if several == names:
                return link
        return Link(min(k.bandwidth for _, k in spanned), max(k.latency_s for _, k in spanned))

    def __str__(self) -> str:
        return "x".join(str(n) for _, n in self.axes)


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Place of a device: the number of its node, and the links inside and from that node."""

    node: int
    intra: LinkSpec
    inter: LinkSpec


def places(groups: Sequence[NodeGroup]) -> tuple[DevicePlace, ...]:
    """The place of each device, in the order of devices; a group with ``inter="intra"`` is one node."""
    places_of_devices: list[DevicePlace] = []
    node = 0
    for group in groups:
        whole = group.inter == "intra"
        inter = group.inter if isinstance(group.inter, LinkSpec) else group.intra
        devices = group.size if whole else group.devices_per_node
        for _ in range(1 if whole else group.count):
            places_of_devices += [DevicePlace(node, group.intra, inter)] * devices
            node += 1
    return tuple(places_of_devices)


def _group_keys(shape: tuple[int, ...], varied_axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of each device, of a mesh of ``shape``, along all axes but ``varied_axes``: the key of its group."""
    kept = [d for d in range(len(shape)) if d not in varied_axes]
    return [tuple(at[d] for d in kept) for at in product(*map(range, shape))]


def group_link(devices: Sequence[DevicePlace], shape: tuple[int, ...], varied: tuple[int, ...]) -> Link:
    """The link of collectives over some axes of a mesh, by the formula of this module.

    Args:
        devices: the place of each device, major first; as many as the mesh holds.
        shape: sizes of the mesh's axes.
        varied: indices of the axes that the collective runs over.
    """
    sizes = [shape[d] for d in varied if shape[d] > 1]
    if not sizes:
        return Link(math.inf, 0.0)
    keys = _group_keys(shape, varied)
    by_node = {place.node: place for place in devices}
    members = Counter(zip(keys, (place.node for place in devices), strict=True))  # c of each group and node
    nodes = Counter(key for key, _ in members)
    spanning = Counter(node for key, node in members if nodes[key] > 1)  # k of each node
    hops: Counter[tuple[int, ...]] = Counter()
    latency: dict[tuple[int, ...], float] = {}
    bandwidth = math.inf
    for (key, node), count in members.items():
        intra, inter = by_node[node].intra, by_node[node].inter
        if count > 1:
            dims = min(len(sizes), intra.torus_dims) if nodes[key] == 1 else 1
            bandwidth = min(bandwidth, intra.group_bandwidth(count) * intra.efficiency * dims)
        seconds = count * intra.latency_s
        if nodes[key] > 1:
            node_bandwidth = count * inter.bandwidth
            share = math.inf if inter.node_bandwidth is None else inter.node_bandwidth / spanning[node]
            bandwidth = min(bandwidth, min(node_bandwidth, share) * inter.efficiency)
            seconds = (count - 1) * intra.latency_s + inter.latency_s
        hops[key] += count
        latency[key] = latency.get(key, 0.0) + seconds
    return Link(bandwidth, max(latency[key] / hops[key] for key in sorted(latency)), _span(devices, members, nodes))


def _span(
    devices: Sequence[DevicePlace], members: Counter[tuple[tuple[int, ...], int]], nodes: Counter[tuple[int, ...]]
) -> Span:
    """Place of the group that spans most nodes."""
    widest = max(sorted(nodes), key=lambda key: nodes[key])
    node = next(n for key, n in sorted(members) if key == widest)
    of_node = sum(place.node == node for place in devices)
    at = next(place for place in devices if place.node == node)
    inside = max(count for (key, _), count in members.items() if key == widest)
    ranks = sum(count for (key, _), count in members.items() if key == widest)
    return Span(nodes[widest], inside, of_node, ranks == nodes[widest] * of_node, at.intra, at.inter)


def arrange(devices: Sequence[DevicePlace], shape: tuple[int, ...]) -> LogicalMesh:
    """The mesh of ``shape`` over ``devices`` (their product many, at most 4 axes), with its links."""
    dims = tuple(range(len(shape)))
    names = AXIS_NAMES[: len(shape)]
    wide = [d for d in dims if shape[d] > 1]
    joint = [c for r in range(2, len(wide) + 1) for c in combinations(wide, r)]
    return LogicalMesh(
        axes=tuple(zip(names, shape, strict=True)),
        links=tuple(group_link(devices, shape, (d,)) for d in dims),
        joint=tuple((tuple(names[d] for d in c), group_link(devices, shape, c)) for c in joint),
    )


def mesh_shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of meshes of ``n`` devices: (n,), then every (a, b) with a * b = n and a, b > 1, by rising a."""
    return ((n,), *((a, n // a) for a in range(2, n // 2 + 1) if n % a == 0))


def prime_factors(n: int) -> list[int]:
    """Prime factors of ``n``, smallest first, each as often as it divides."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def distinct(meshes: Sequence[LogicalMesh]) -> tuple[LogicalMesh, ...]:
    """``meshes`` without those that equal an earlier one but for the names and order of axes."""
    seen: set[tuple[object, ...]] = set()
    kept = []
    for mesh in meshes:
        axes = sorted((n, k.bandwidth, k.latency_s) for (_, n), k in zip(mesh.axes, mesh.links, strict=True))
        joint = sorted((len(names), k.bandwidth, k.latency_s) for names, k in mesh.joint)
        key = (tuple(axes), tuple(joint))
        if key not in seen:
            seen.add(key)
            kept.append(mesh)
    return tuple(kept)
