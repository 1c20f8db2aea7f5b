"""Figures of the link between nodes, from timed transfers between workers.

With M bytes of an array, alpha seconds a message, b bytes/s of a device and B bytes/s of all devices of a node:

    bounce of an array on one device          alpha + M / b                each way
    bounce of an array on several devices     alpha + M / B                each way
    fan of an array to each of k workers    2 alpha + k M / B              the second alpha: their answers, at once

alpha, 1/b and 1/B are the non-negative least squares of relative errors over medians of repetitions. Where the devices
of a node are too slow to fill its network, B is what they reach together. A chain of workers, each of which sends on
what it receives, is not fitted: it tells how far transfers that overlap are from what the figures say of each.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from autopar.cluster import Link, LinkSpec
from autopar.cost.calibration import spread_of
from autopar.cost.sends import lane_s
from autopar.errors import AutoparError

#: An array to and fro between two; one to each of several at once; several in a row from worker to worker.
How: TypeAlias = Literal["bounce", "fan", "chain"]


@dataclass(frozen=True)
class LinkSample:
    """Transfers between workers, timed several times.

    Args:
        how: "bounce": to and fro between two; "fan": one to each of several at once; "chain": several from worker to
            worker.
        workers: numbers of those who take part; the first began, and of a chain each sends to the next.
        bytes: of one array.
        lanes: devices of a worker that an array lies on.
        count: arrays of a chain.
        seconds: one for each repetition: of one way of a bounce, or of all until the answers were there.
    """

    how: How
    workers: tuple[int, ...]
    bytes: int
    lanes: int
    count: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def targets(self) -> int:
        """Number of workers but the first."""
        return len(self.workers) - 1


@dataclass(frozen=True)
class Network:
    """Links between workers.

    Args:
        link: bandwidth of one device, and latency of a message.
        node_bandwidth: bytes/s that all devices of a worker send together; None where nothing told it.
        error: median relative error of the figures.
        spread: median spread of the measurements.
        chain_share: seconds of chains over what the figures say; None where there are none.
    """

    link: Link
    node_bandwidth: float | None
    error: float
    spread: float
    chain_share: float | None


def fit_network(samples: Sequence[LinkSample]) -> Network:
    """Latency and bandwidth of links, fitted to measured samples.

    Raises:
        AutoparError: no array on one device was sent to and fro in two sizes.
    """
    fitted = [s for s in samples if s.how != "chain"]
    if len({s.bytes for s in fitted if not _of_node(s)}) < 2:
        raise AutoparError("the link between workers needs transfers of two sizes", remedy="give two in Effort")
    parts = [_parts(s) for s in fitted]
    measured = [s.median_s for s in fitted]
    latency_s, device_s, node_s = _least_squares(parts, measured)
    has_node = any(_of_node(s) for s in fitted)
    # Where noise leaves nothing for the bytes, the fastest transfer bounds what they take.
    device_s = device_s or min(t / p[1] for p, t in zip(parts, measured, strict=True) if p[1])
    if has_node:
        node_s = node_s or min(t / p[2] for p, t in zip(parts, measured, strict=True) if p[2])
    link = Link(1 / device_s, latency_s)
    network = Network(link, 1 / node_s if has_node else None, 0.0, 0.0, None)
    chains = [s.median_s / transfer_s(s, network) for s in samples if s.how == "chain"]
    return Network(
        link,
        network.node_bandwidth,
        statistics.median(abs(transfer_s(s, network) / s.median_s - 1) for s in fitted),
        statistics.median(spread_of(s.seconds) for s in fitted),
        statistics.median(chains) if chains else None,
    )


def transfer_s(sample: LinkSample, network: Network) -> float:
    """Seconds that the figures say of what a sample measured.

    Args:
        sample: its seconds are not looked at.
        network: the figures.
    """
    messages, device_bytes, node_bytes = _parts(sample)
    link = network.link
    bandwidth = (network.node_bandwidth or sample.lanes * link.bandwidth) if _of_node(sample) else link.bandwidth
    once_s = lane_s(device_bytes + node_bytes, LinkSpec(bandwidth, link.latency_s))
    return (messages - 1) * link.latency_s + once_s


def _of_node(s: LinkSample) -> bool:
    return s.how == "fan" or s.lanes > 1


def _parts(s: LinkSample) -> tuple[float, float, float]:
    """Messages one after the other, and the bytes that one device, or all of a node, send one after the other."""
    match s.how:
        case "bounce":
            messages, sent = 1, s.bytes
        case "fan":
            messages, sent = 2, s.targets * s.bytes
        case "chain":
            # The last array starts when those before it have left, and goes from worker to worker; then the answer.
            in_a_row = s.count + s.targets - 1
            messages, sent = in_a_row + 1, in_a_row * s.bytes
    return (messages, 0.0, sent) if _of_node(s) else (messages, sent, 0.0)


def _least_squares(parts: Sequence[tuple[float, ...]], measured: Sequence[float]) -> tuple[float, ...]:
    """Factors >= 0 of the parts whose sums are nearest to what was measured, by relative error."""
    rows = np.array(parts) / np.array(measured)[:, None]
    width = rows.shape[1]
    best: tuple[float, ...] = (0.0,) * width
    least = float(len(measured))
    # The few factors allow trying which of them are zero.
    for kept in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        columns = rows[:, kept]
        # Messages and bytes differ by many orders of magnitude, which least squares take for dependence.
        scale = np.abs(columns).max(axis=0)
        if not scale.all():
            continue
        solved, *_ = np.linalg.lstsq(columns / scale, np.ones(len(rows)), rcond=None)
        coefficients = [float(v) for v in solved / scale]
        off = float(np.sum((columns @ np.array(coefficients) - 1) ** 2))
        if min(coefficients) >= 0 and off < least:
            by_place = dict(zip(kept, coefficients, strict=True))
            best, least = tuple(by_place.get(n, 0.0) for n in range(width)), off
    return best
