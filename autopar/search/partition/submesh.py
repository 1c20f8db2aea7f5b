"""Submeshes that a stage may have, and where on the cluster the chosen ones lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster


@dataclass(frozen=True, order=True)
class Submesh:
    """A kind of submesh.

    Args:
        group: node group of the cluster that it is of.
        size: devices.
    """

    group: int
    size: int


def submeshes(cluster: Cluster) -> list[Submesh]:
    """Powers of two inside a node, and whole nodes, of every node group (Alpa, OSDI'22, section 5.2)."""
    submeshes_of = []
    for g, group in enumerate(cluster.groups):
        inside = group.devices_per_node if group.inter != "intra" else group.size
        sizes = [2**k for k in range(inside.bit_length()) if inside % 2**k == 0 and 2**k < inside]
        nodes = group.size // inside
        sizes += [inside * n for n in range(1, nodes + 1) if n & (n - 1) == 0 or n == nodes]
        submeshes_of += [Submesh(g, size) for size in sizes]
    return submeshes_of


def worthwhile(cluster: Cluster, stages: int, uneven: int = 2) -> list[Submesh]:
    """The `submeshes` that ``stages`` of them, which together are all devices, may use.

    The even share is one of them if it is whole nodes, as 6 nodes each for 64 stages on 384. A stage with twice its
    share leaves the others with half of theirs; more uneven submeshes never paid in trials, and are taken only where
    there is nothing else.

    Args:
        cluster: all devices.
        stages: their number.
        uneven: how many times its share a stage may have, or the share may be of what it has.
    """
    every = submeshes(cluster)
    if len(cluster.groups) > 1:
        return every
    devices = cluster.num_devices
    even = devices / stages
    (group,) = cluster.groups
    if devices % stages == 0 and even % group.devices_per_node == 0:
        every = sorted({*every, Submesh(0, devices // stages)})
    for most in (uneven, 2, devices):
        near = [m for m in every if even / most <= m.size <= most * even and m.size <= devices]
        if usable := _usable(near, stages, devices):
            return usable
    return []


def _usable(kinds: Sequence[Submesh], stages: int, devices: int) -> list[Submesh]:
    """The ``kinds`` that some ``stages`` of them, adding up to ``devices``, may use."""
    sums = [{0}]
    for _ in range(stages - 1):
        sums.append({a + m.size for a in sums[-1] for m in kinds if a + m.size <= devices})
    return [m for m in kinds if devices - m.size in sums[stages - 1]]


def placed(cluster: Cluster, submeshes: Sequence[Submesh]) -> tuple[tuple[int, int], ...]:
    """(first device, number of devices) of each stage: in a group the largest first.

    Sizes inside a node are powers of two that divide it, so in this order they never straddle two nodes.
    """
    placements: dict[int, tuple[int, int]] = {}
    at = list(cluster.group_starts)
    for i in sorted(range(len(submeshes)), key=lambda i: (-submeshes[i].size, i)):
        group, size = submeshes[i].group, submeshes[i].size
        placements[i] = (at[group], size)
        at[group] += size
    return tuple(placements[i] for i in range(len(submeshes)))


def of_equal_nodes(cluster: Cluster, kinds: Sequence[Submesh], stages: int) -> list[Submesh]:
    """The submeshes of stages that have equal numbers of nodes.

    Args:
        cluster: all devices.
        kinds: of submeshes.
        stages: their number.
    """
    if len(cluster.groups) == 1:
        return [k for k in kinds if k.size * stages == cluster.num_devices]
    return [k for k in kinds if k.size * stages == cluster.groups[k.group].devices_per_node * cluster.num_nodes]
