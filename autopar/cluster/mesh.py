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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

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


@dataclass(frozen=True)
class _Groups:
    """Devices by group of a collective, and of each group by node.

    Args:
        group: of each pair of a group and a node that it is on, by rising group and node, the number of the group.
        node: of each pair, the number of the node among those of the mesh.
        count: of each pair, the devices of the group there.
        nodes: of each group, the nodes that it is on.
        places: of each node, the place of a device there.
    """

    group: np.ndarray
    node: np.ndarray
    count: np.ndarray
    nodes: np.ndarray
    places: tuple[DevicePlace, ...]

    @classmethod
    def of(cls, devices: Sequence[DevicePlace], shape: tuple[int, ...], varied: tuple[int, ...]) -> _Groups:
        """Groups of devices that differ along the axes ``varied`` alone; see `group_link`."""
        kept = [1 if d in varied else n for d, n in enumerate(shape)]
        numbers = np.broadcast_to(np.arange(math.prod(kept)).reshape(kept), shape).ravel()
        by_node = {place.node: place for place in devices}
        at = {node: n for n, node in enumerate(by_node)}
        nodes = np.array([at[place.node] for place in devices])
        pairs, count = np.unique(numbers * len(by_node) + nodes, return_counts=True)
        group, node = np.divmod(pairs, len(by_node))
        return cls(group, node, count, np.bincount(group), tuple(by_node.values()))


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
    groups = _Groups.of(devices, shape, varied)
    spans = groups.nodes[groups.group] > 1
    spanning = np.bincount(groups.node[spans], minlength=len(groups.places))  # k of each node
    kinds: dict[tuple[int, int], int] = {}
    kind = np.array([kinds.setdefault((id(p.intra), id(p.inter)), len(kinds)) for p in groups.places])
    rows = np.stack([kind[groups.node], groups.count, spans, spanning[groups.node]])
    _, first, row = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    lines = []
    for n in first:  # of equal pairs one is priced
        place, count = groups.places[groups.node[n]], int(groups.count[n])
        lines.append(_line(place, count, bool(spans[n]), int(spanning[groups.node[n]]), len(sizes)))
    seconds = np.array([latency_s for _, latency_s in lines])[row.ravel()]
    latencies_s = np.bincount(groups.group, seconds) / np.bincount(groups.group, groups.count)
    return Link(min(bandwidth for bandwidth, _ in lines), float(latencies_s.max()), _span(devices, groups))


def _line(place: DevicePlace, count: int, spans: bool, spanning: int, axes: int) -> tuple[float, float]:
    """Bandwidth that a group has on a node, and seconds of its hops there.

    Args:
        place: of a device of the node.
        count: c, devices of the group there.
        spans: whether the group is on other nodes too.
        spanning: k, groups of the node that are.
        axes: of the mesh that the collective runs over.
    """
    intra, inter, bandwidth = place.intra, place.inter, math.inf
    if count > 1:
        dims = 1 if spans else min(axes, intra.torus_dims)
        bandwidth = intra.group_bandwidth(count) * intra.efficiency * dims
    if not spans:
        return bandwidth, count * intra.latency_s
    share = math.inf if inter.node_bandwidth is None else inter.node_bandwidth / spanning
    bandwidth = min(bandwidth, min(count * inter.bandwidth, share) * inter.efficiency)
    return bandwidth, (count - 1) * intra.latency_s + inter.latency_s


def _span(devices: Sequence[DevicePlace], groups: _Groups) -> Span:
    """Place of the group that spans most nodes."""
    widest = int(groups.nodes.argmax())
    there = groups.group == widest
    at, nodes = groups.places[groups.node[there][0]], int(groups.nodes[widest])
    of_node = sum(place.node == at.node for place in devices)
    counts = groups.count[there]
    return Span(nodes, int(counts.max()), of_node, int(counts.sum()) == nodes * of_node, at.intra, at.inter)


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
