"""Figures of a cluster file, from measured times: peaks, efficiency curves, launch, links.

What is fitted, each by medians of repeated measurements:

    call           seconds of a program that does next to nothing; taken off all other measurements
    launch         slope of the seconds of a chain of tiny operators over its length
    products       the curve is the geometric mean of the rates of the shapes of one size; its best is the peak
    memory         likewise, of cheap elementwise operators and sums
    links          alpha and beta of `autopar.cost.collectives`, least squares of relative errors over all
                   collectives, groups and sizes
    collectives    medians by kind, group and bytes, over groups of neighbours and of devices far apart
    refill         bytes of a matrix over the seconds by which all-reduces take longer between products than in a row
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.cluster import Curve, Link, MeasuredCollective
from autopar.cost.collectives import collective_on_link_s
from autopar.cost.convolutions import Convolution
from autopar.errors import AutoparError

#: What is taken off a measurement leaves this share of it, and no efficiency is below.
_LEAST_SHARE, LEAST_EFFICIENCY = 0.5, 1e-3

What = Literal[
    "call", "chain", "product", "copy", "collective",
    "between", "convolution", "reorder", "reduction", "function", "first touch",
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One thing measured several times.

    Args:
        what: a "call" of next to nothing, a "chain" of tiny operators, a matrix "product", a "copy" (an elementwise
            operator or a sum), a "collective", a product with or without a collective "between" it and the next one, or
            a kind of `autopar.cost.calibrated_kinds`.
        name: dtype of products and copies; kind of the collective or convolution; "" of products
            between which there is none; the function; "" for others.
        amount: operators of a chain, FLOPs of a product or convolution, bytes read and written by a copy, bytes read by
            a copy in another order or a reduction, bytes of the full tensor of a collective, bytes of the result of a
            product with or without one after it, elements of a function, bytes of new memory; of one of ``runs``.
        runs: how often the program does it.
        group: devices that a collective runs over, all groups at once.
        seconds: of the whole program, one for each repetition.
        side_bytes: of a copy in another order the bytes between elements that come to lie side by side; of a
            reduction the bytes side by side that go into one result.
        convolution: its sizes.
    """

    what: What
    name: str
    amount: float
    runs: int
    group: int
    seconds: tuple[float, ...]
    side_bytes: int = 0
    convolution: Convolution | None = None

    @property
    def median_s(self) -> float:
        """Median of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles of repetitions over their median; 0 of a single one."""
        return spread_of(self.seconds)


@dataclass(frozen=True)
class Rate:
    """A peak and how much of it is reached.

    Args:
        peak: FLOP/s or bytes/s, the best that was measured.
        efficiency: share reached by amount.
        spread: median spread of the measurements.
    """

    peak: float
    efficiency: Curve
    spread: float


@dataclass(frozen=True)
class Refill:
    """Caches that devices fill again after they waited for each other, as `autopar.cluster.LinkSpec` has it.

    Args:
        bandwidth: bytes/s at which caches are filled again.
        bytes: that are filled again at most.
    """

    bandwidth: float
    bytes: float


@dataclass(frozen=True)
class Calibration:
    """Figures of the devices that were measured.

    Args:
        call_s: seconds that a call of a program costs.
        launch_s: seconds that starting an operator costs.
        products: by dtype.
        memory: of memory, read and written.
        link: between devices; None where there is one device.
        link_error: median relative error of the fitted link.
        link_spread: median spread of the collectives' measurements.
        chain_spread: likewise of the chains.
        collectives: what they took in a row, by kind and group.
        refill: what they take longer after work; None where that is nothing.
    """

    call_s: float
    launch_s: float
    products: tuple[tuple[str, Rate], ...]
    memory: Rate
    link: Link | None
    link_error: float
    link_spread: float
    chain_spread: float
    collectives: tuple[MeasuredCollective, ...] = ()
    refill: Refill | None = None


def spread_of(seconds: Sequence[float]) -> float:
    """Distance of the quartiles of repetitions over their median; 0 of a single one."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (0.0, 0.0, 0.0)
    return (high - low) / statistics.median(seconds)


def fit(samples: Sequence[Sample]) -> Calibration:
    """The figures that samples of all kinds give.

    Raises:
        AutoparError: there are no chains of two lengths, no copies, or no products in f32.
    """
    by_what: dict[str, list[Sample]] = defaultdict(list)
    for s in samples:
        by_what[s.what].append(s)
    chains, products = by_what["chain"], by_what["product"]
    names = sorted({s.name for s in products})
    if len({s.amount for s in chains}) < 2 or not by_what["copy"] or "f32" not in names:
        raise AutoparError(
            f"a calibration needs chains of two lengths, copies and products in f32, not {sorted(by_what)} of {names}"
        )
    call_s = statistics.median(s.median_s for s in by_what["call"]) if by_what["call"] else 0.0
    launch_s = _slope(chains, call_s)

    def busy(s: Sample) -> float:
        return busy_s(s, call_s, launch_s)

    link = fit_link(by_what["collective"], call_s) if by_what["collective"] else None
    collectives = collectives_of(by_what["collective"], call_s)
    return Calibration(
        call_s,
        launch_s,
        tuple((name, rate_of([s for s in products if s.name == name], busy)) for name in names),
        rate_of(by_what["copy"], busy),
        link,
        link_error(by_what["collective"], call_s, link) if link else 0.0,
        median_spread(by_what["collective"]),
        median_spread(chains),
        collectives,
        refill_of(collectives, by_what["between"], call_s),
    )


def _slope(chains: Sequence[Sample], call_s: float) -> float:
    """Median of the slopes of all pairs (Theil and Sen)."""
    once = [(s.amount, (s.median_s - call_s) / s.runs) for s in chains]
    pairs = itertools.combinations(once, 2)
    return max(0.0, statistics.median((t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairs if n0 != n1))


def busy_s(s: Sample, call_s: float, launch_s: float) -> float:
    """Seconds of one run of a sample, less those of the call and of the launch."""
    return max((s.median_s - call_s) / s.runs - launch_s, _LEAST_SHARE * s.median_s / s.runs)


def rate_of(samples: Sequence[Sample], busy: Callable[[Sample], float]) -> Rate:
    """Peak and curve of samples by their amounts.

    Args:
        samples: some.
        busy: seconds of one run.
    """
    by_size: dict[int, list[Sample]] = defaultdict(list)
    for s in samples:
        # Sums read an array once more than other operators, and are counted with those of the same array.
        by_size[math.floor(math.log(s.amount, 4))].append(s)
    rates = {
        statistics.geometric_mean(s.amount for s in of_size): statistics.geometric_mean(
            s.amount / busy(s) for s in of_size
        )
        for _, of_size in sorted(by_size.items())
    }
    peak = max(rates.values())
    curve = Curve(tuple((amount, max(LEAST_EFFICIENCY, rate / peak)) for amount, rate in rates.items()))
    return Rate(peak, curve, median_spread(samples))


def median_spread(samples: Sequence[Sample]) -> float:
    """Median spread of samples; 0 of none."""
    return statistics.median(s.spread for s in samples) if samples else 0.0


def fit_link(collectives: Sequence[Sample], call_s: float) -> Link:
    """Latency and bandwidth for which the formulas of collectives come nearest to what was measured.

    Args:
        collectives: samples of several kinds and sizes.
        call_s: seconds of a call, taken off each.
    """
    rows, ones = [], []
    for s in collectives:
        measured = _collective_s(s, call_s)
        hops = collective_on_link_s(s.name, 0.0, s.group, Link(1.0, 1.0))
        sent = collective_on_link_s(s.name, s.amount, s.group, Link(1.0, 0.0))
        rows.append((hops / measured, sent / measured))
        ones.append(1.0)
    from_scratch, *_ = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)
    latency_s, per_byte_s = (float(v) for v in from_scratch)
    # Where noise makes one of them negative the other explains all.
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, float(np.median([1 / b for _, b in rows if b > 0]))
    if per_byte_s <= 0:
        per_byte_s = min(1 / b for _, b in rows if b > 0)
    return Link(1 / per_byte_s, latency_s)


def collectives_of(collectives: Sequence[Sample], call_s: float) -> tuple[MeasuredCollective, ...]:
    """Seconds of collectives by kind, group and bytes. Fewer bytes never take longer: a larger value counts as noise.

    Args:
        collectives: samples; those of one kind, group and size are of groups that lie differently.
        call_s: seconds of a call, taken off each.
    """
    measured: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in collectives:
        measured[s.name, s.group][s.amount].append(_collective_s(s, call_s))
    collectives_by_group = []
    for (kind, group), by_bytes in sorted(measured.items()):
        sizes = sorted(by_bytes)
        seconds = itertools.accumulate((statistics.geometric_mean(by_bytes[b]) for b in sizes), max)
        collectives_by_group.append(MeasuredCollective(kind, group, tuple(zip(sizes, seconds, strict=True))))
    return tuple(collectives_by_group)


def refill_of(collectives: Sequence[MeasuredCollective], between: Sequence[Sample], call_s: float) -> Refill | None:
    """Bytes of a matrix, and these over what small all-reduces take longer between products of such than in a row.

    The median of groups counts; None where it is not longer. Devices that wait for each other change places on the
    cores of a host, and find their caches lost.

    Args:
        collectives: what they take in a row.
        between: samples of products with and without an all-reduce between them.
        call_s: seconds of a call, taken off each.
    """
    products = [s for s in between if not s.name]
    if not products:
        return None
    alone_s = statistics.median(_collective_s(s, call_s) for s in products)
    in_a_row_s = {m.devices: m.seconds[0][1] for m in collectives if m.kind == "all-reduce"}
    longer_s = [
        _collective_s(s, call_s) - alone_s - in_a_row_s[s.group] for s in between if s.name and s.group in in_a_row_s
    ]
    if not longer_s or statistics.median(longer_s) <= 0:
        return None
    return Refill(products[0].amount / statistics.median(longer_s), products[0].amount)


def link_error(collectives: Sequence[Sample], call_s: float, link: Link) -> float:
    """Median relative error of the formulas with a link."""
    return statistics.median(
        abs(collective_on_link_s(s.name, s.amount, s.group, link) / _collective_s(s, call_s) - 1) for s in collectives
    )


def _collective_s(s: Sample, call_s: float) -> float:
    return max((s.median_s - call_s) / s.runs, _LEAST_SHARE * s.median_s / s.runs)
