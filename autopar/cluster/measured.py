"""`MeasuredCollective`: seconds of one kind of collective that were measured on groups of devices of a node."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass

from autopar.cluster.checks import positive, text, whole
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
