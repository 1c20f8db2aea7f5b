"""The cluster that benchmarks of bytes plan for."""

from __future__ import annotations

from autopar import Cluster
from autopar.cluster import Device, LinkSpec, NodeGroup

DEVICES = 8


def bytes_cluster(memory_bytes: int = 10**12, devices: int = DEVICES) -> Cluster:
    """One node of 8 devices on which, among plans that split all arithmetic, the one that sends least is fastest.

    Arithmetic is slow (10 GFLOP/s), so that leaving a product of matrices unsplit does not pay; the links
    (1 GB/s) have no latency, so that a collective costs exactly its bytes; memory is so fast that light
    operators cost nothing. A program that moves fewer bytes by computing everything everywhere is thus no answer.

    Args:
        memory_bytes: bytes a device.
        devices: how many.
    """
    device = Device("bytes", memory_bytes, 1e15, (("f32", 1e10),), jax_kinds=("cpu",))
    link = LinkSpec(1e9, 0.0)
    return Cluster("bytes", (NodeGroup(1, devices, device, link, link),))
