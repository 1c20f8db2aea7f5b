"""Seconds of collectives inside a node from those that were measured there, on groups of several sizes.

A group of a size that was not measured lies between two that were: the logarithm of its seconds is linear in the
logarithm of its devices. Groups larger than all of them take as much longer than the largest as a ring would.
"""

from __future__ import annotations

import math

from autopar.cluster import Link, LinkSpec
from autopar.cost.collectives import collective_on_link_s


def measured_s(kind: str, full_bytes: float, devices: int, link: LinkSpec) -> float | None:
    """Seconds of a collective that all groups of a node run at once; None where its kind was not measured.

    Args:
        kind: of it.
        full_bytes: bytes of the full tensor as one group sees it; none take no time.
        devices: of a group.
        link: what connects devices of the node.
    """
    known = [m for m in link.collectives if m.kind == kind]  # by rising sizes
    if not known:
        return None
    if devices == 1 or not full_bytes:
        return 0.0
    below = [m for m in known if m.devices <= devices]
    above = [m for m in known if m.devices >= devices]
    if not below:
        return above[0].at(full_bytes)
    largest = below[-1]
    least_s = largest.at(full_bytes)
    if not above:
        ring = Link(link.bandwidth * link.efficiency, link.latency_s)
        of_all, of_largest = (collective_on_link_s(kind, full_bytes, n, ring) for n in (devices, largest.devices))
        return least_s * of_all / of_largest
    if above[0].devices == devices:
        return above[0].at(full_bytes)
    share = math.log(devices / largest.devices) / math.log(above[0].devices / largest.devices)
    return float(least_s ** (1 - share) * above[0].at(full_bytes) ** share)
