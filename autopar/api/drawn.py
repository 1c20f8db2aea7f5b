"""Plans that check something: where nothing was asked for, a small model on CPUs is best left whole on every device."""

from __future__ import annotations

from dataclasses import replace

from autopar.api.many_hosts import many
from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup

# Arithmetic so slow, and links so fast, that splitting pays for arrays of a few numbers.
_FLOPS, _MEMORY_BANDWIDTH, _LINK_BANDWIDTH, _MEMORY_BYTES = 1e8, 1e9, 1e11, 10**11


def drawn_options(options: ParallelOptions) -> list[ParallelOptions]:
    """Options of the plans that a step is checked under.

    Args:
        options: those of the function. Where they say what to plan for, or how, they are the only ones; else the step
            is planned for slow devices, once at once and once in two microbatches.
    """
    asked = (options.cluster, options.plan, options.mesh_shape, options.like, options.memory_limit_bytes)
    devices = 1 if many(options) is not None else Cluster.local().num_devices
    if any(a is not None for a in asked) or options.constraints or options.search != "alpa" or devices == 1:
        return [options]
    splitting = replace(options, cluster=_slow(devices))
    if options.num_microbatches != "auto" or options.num_stages != "auto":
        return [splitting]
    return [replace(splitting, num_microbatches=1), replace(splitting, num_microbatches=2, num_stages=1)]


def _slow(devices: int) -> Cluster:
    link = LinkSpec(_LINK_BANDWIDTH, 0.0)
    device = Device("slow", _MEMORY_BYTES, _MEMORY_BANDWIDTH, (("f32", _FLOPS),))
    return Cluster("devices on which splitting pays", (NodeGroup(1, devices, device, link, link),))
