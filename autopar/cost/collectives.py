"""Seconds and bytes of collectives: the alpha-beta model of a ring.

With n devices in a group, M bytes of the full tensor as one group sees it, alpha seconds a message and
beta seconds a byte (1 / bandwidth):

    all-reduce                      2 (n-1) alpha + 2 (n-1)/n M beta
    all-gather, reduce-scatter        (n-1) alpha +   (n-1)/n M beta     M: gathered, or unreduced
    all-to-all                        (n-1) alpha + (n-1)/n^2 M beta     M: all pieces, each device holds M/n
    collective-permute, send                alpha +           M beta     M: what one device sends

The ring is that of Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009); the bandwidth terms are the bus bandwidth factors of NVIDIA's nccl-tests. Inside a node
seconds that were measured on groups of several sizes take its place.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Link, LinkSpec, LogicalMesh

#: Kinds of collectives, and ``send`` between two devices.
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send")


def _ring(kind: str, n: int) -> tuple[float, float]:
    """Messages, and multiples of M, that one device sends one after the other."""
    if kind not in KINDS:
        raise ValueError(f"no collective is called {kind!r}; there are {', '.join(KINDS)}")
    if n < 1:
        raise ValueError(f"a collective needs a device or more, not {n}")
    if n == 1:
        return 0.0, 0.0
    match kind:
        case "all-reduce":
            return 2.0 * (n - 1), 2 * (n - 1) / n
        case "all-gather" | "reduce-scatter":
            return n - 1.0, (n - 1) / n
        case "all-to-all":
            return n - 1.0, (n - 1) / n**2
        case _:
            return 1.0, 1.0


def wire_bytes(kind: str, full_bytes: float, n: int) -> float:
    """Bytes that one device sends.

    Args:
        kind: one of `KINDS`, else ValueError.
        full_bytes: bytes of the full tensor (M above).
        n: devices in a group; with 1 nothing is sent.
    """
    return _ring(kind, n)[1] * full_bytes


def collective_on_link_s(kind: str, full_bytes: float, n: int, link: Link) -> float:
    """Seconds of a ring of ``n`` devices over ``link``; `collective_s` finds both from a mesh.

    Args:
        kind: one of `KINDS`, else ValueError.
        full_bytes: bytes of the full tensor (M above).
        n: devices in a group; 1 costs nothing. A send has 2.
        link: bandwidth in bytes/s and latency in seconds of every hop.
    """
    messages, share = _ring(kind, n)
    return messages * link.latency_s + share * full_bytes / link.bandwidth


def collective_s(kind: str, full_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh) -> float:
    """Seconds of a collective that all groups along ``axes`` run at once.

    Args:
        kind: one of `KINDS`, else ValueError.
        full_bytes: bytes of the full tensor as one group of devices along ``axes`` sees it: its bytes
            divided by the shards over the other axes.
        axes: names of mesh axes, taken together; KeyError if the mesh has no such axis.
        mesh: the mesh; its link for ``axes`` gives alpha and beta.
    """
    return collective_on_link_s(kind, full_bytes, mesh.group_size(axes), mesh.link(axes))


def tree_latency_s(n: int, link: Link) -> float:
    """Latency of an all-reduce in a tree (NCCL's double binary tree): up and down, 2 log2(n) alpha."""
    return 2 * math.log2(n) * link.latency_s


def all_reduce_tree_s(full_bytes: float, n: int, link: Link) -> float:
    """Seconds of an all-reduce in a tree: the bytes of the ring, the latency of `tree_latency_s`.

    Args:
        full_bytes: bytes of the tensor.
        n: devices in a group; 1 costs nothing.
        link: bandwidth in bytes/s and latency in seconds of every hop.
    """
    return tree_latency_s(n, link) + wire_bytes("all-reduce", full_bytes, n) / link.bandwidth


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


def refill_s(bytes: float | NDArray[np.float64], link: LinkSpec) -> float | NDArray[np.float64]:
    """Seconds in which a device gets back into its caches what it loses there while it waits for others.

    Args:
        bytes: of what a device holds of the value that is sent.
        link: what connects devices of the node.
    """
    if link.refill_bandwidth is None:
        return 0.0 * bytes
    most = math.inf if link.refill_bytes is None else link.refill_bytes
    return np.minimum(bytes, most) / link.refill_bandwidth


def collective_matmul_s(blocks: int, block_s: float, message_s: float, *, overlaps: bool) -> float:
    """Seconds of a product in ``blocks`` blocks with a message between each two of them:

        b + (n - 1) max(b, m)        n b + (n - 1) m where devices do not compute while they send

    The first block is there, or begins the sum; each other one waits for its message, or its message for it (Wang et
    al., ASPLOS'23, section 4).

    Args:
        blocks: n, the devices among which blocks travel.
        block_s: b, seconds of the product of one block.
        message_s: m, seconds in which a block travels by one place.
        overlaps: whether devices compute while they send.
    """
    each_s = max(block_s, message_s) if overlaps else block_s + message_s
    return block_s + (blocks - 1) * each_s
