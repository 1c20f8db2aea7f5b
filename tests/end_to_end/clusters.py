"""Clusters of eight devices that make small models worth splitting: no latency, slow arithmetic."""

from __future__ import annotations

from autopar import Cluster
from autopar.cluster import Device, LinkSpec, NodeGroup


def toy(bandwidth: float = 1e9, memory: int = 10**9, flops: float = 1e8, devices: int = 8) -> Cluster:
    """One node of ``devices`` devices.

    Args:
        bandwidth: bytes/s of the links.
        memory: bytes a device.
        flops: FLOP/s a device.
        devices: how many.
    """
    device = Device("toy", memory, 1e9, (("f32", flops),))
    link = LinkSpec(bandwidth, 0.0)
    return Cluster("toy", (NodeGroup(1, devices, device, link, link),))


FAST = toy(bandwidth=1e11)
MIDDLE = toy()
SLOW = toy(bandwidth=1e6)
