"""`LogicalMesh`: devices arranged in named axes, each with the link that its collectives use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.cluster.group import LinkSpec


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
