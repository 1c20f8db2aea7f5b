"""The groups of nodes that the devices of a `jax.distributed` world, or of one process, form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar._compat.devices import FoundDevice
from autopar.cluster.device import Device
from autopar.cluster.group import NodeGroup
from autopar.errors import ClusterError


def one_node(devices: Sequence[FoundDevice], like: NodeGroup) -> NodeGroup:
    """The group of the devices of one process.

    Args:
        devices: the devices, of one kind.
        like: what the cluster file of their kind says.
    """
    return dataclasses.replace(like, count=1, devices_per_node=len(devices), device=_limited(devices, like.device))


def groups_of(devices: Sequence[FoundDevice], like: NodeGroup) -> tuple[NodeGroup, ...]:
    """The groups of the devices of several processes, of one kind: one for each size of nodes.

    A node is a process with CPUs, a machine (or several that one fast network joins) with GPUs. Of TPUs it is a host of
    a slice where there is one slice; several slices are a node each, with their network between them.

    Args:
        devices: the devices, node by node.
        like: what the cluster file of their kind says.

    Raises:
        ClusterError: there are several slices, and the file does not know what joins them.
    """
    platform = devices[0].platform
    slices = _sizes([d.slice for d in devices])
    like = dataclasses.replace(like, device=_limited(devices, like.device))
    if platform == "cpu":
        nodes = _sizes([(d.slice, d.process) for d in devices])
    elif like.inter == "intra" and len(slices) == 1:
        hosts = _sizes([d.process for d in devices])
        nodes = hosts if len(set(hosts)) == 1 else slices
    else:
        nodes = slices
    if like.inter == "intra" and len(slices) > 1:
        if like.slices is None:
            raise ClusterError(
                f"{len(slices)} slices of {like.device.kind}, and their cluster file does not say what joins them",
                remedy="add [groups.slices] to a copy of the file, and pass it as cluster=",
            )
        like = dataclasses.replace(like, inter=like.slices)
    sizes = list(dict.fromkeys(nodes))
    return tuple(dataclasses.replace(like, count=nodes.count(n), devices_per_node=n) for n in sizes)


def _sizes(keys: Sequence[object]) -> list[int]:
    """Number of each key, in order of their first."""
    return [keys.count(k) for k in dict.fromkeys(keys)]


def _limited(devices: Sequence[FoundDevice], device: Device) -> Device:
    """The device with no more memory than jax may allocate on any of ``found``."""
    limit = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=device.memory_bytes)
    return dataclasses.replace(device, memory_bytes=min(device.memory_bytes, limit))
