"""Figures of the kinds of work that neither FLOPs nor bytes explain, from measured times.

convolutions    of the peak of products, what they reach by FLOPs: geometric mean over images and features; those of
                kernels' gradients by themselves
few features    of that, what convolutions and gradients of kernels reach whose results have few features
few images      of what it reaches with most images, that of a kernel's gradient that sums over few
other orders    bytes of memory bandwidth reached by a copy that brings elements side by side that lay apart
short sums      likewise of sums, by the bytes that lie side by side and go into one result
functions       seconds an element beyond those of a multiplication and an addition
new memory      bytes/s of writing memory that the system just gave, beyond the seconds of writing it again
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.cluster import Curve
from autopar.cost.calibration import LEAST_EFFICIENCY, Calibration, Rate, Sample, busy_s, median_spread, rate_of

#: Functions that are not measured take as long as these.
_LIKE: Mapping[str, str] = MappingProxyType(
    {"exp2": "exp", "expm1": "log1p", "log2": "log", "erfc": "erf", "tan": "sin"}
)
#: Of the seconds of a multiplication and an addition; a function that takes less longer is not told apart from them.
_LEAST_LONGER = 0.05
_KINDS = (
    "convolution", "kernel gradient", "features of convolution", "features of kernel gradient", "images",
    "reorder", "reduction", "function", "first touch",
)  # fmt: skip


@dataclass(frozen=True)
class Kinds:
    """Figures of kinds of work; None or empty where nothing was measured.

    Args:
        convolution: share of the peak of products by FLOPs.
        kernel_gradient: likewise.
        features: share of ``convolution`` by features of the result.
        gradient_features: likewise of ``kernel_gradient``.
        gradient_images: share of what most images reach, by images.
        reorder: share of the bandwidth of memory by stride.
        reduction: likewise of sums by run.
        first_touch_bandwidth: bytes/s.
        function_s: (primitive, seconds an element).
        spreads: (kind, median spread of its measurements).
    """

    convolution: Curve | None = None
    kernel_gradient: Curve | None = None
    features: Curve | None = None
    gradient_features: Curve | None = None
    gradient_images: Curve | None = None
    reorder: Curve | None = None
    reduction: Curve | None = None
    first_touch_bandwidth: float | None = None
    function_s: tuple[tuple[str, float], ...] = ()
    spreads: tuple[tuple[str, float], ...] = ()


def fit_kinds(samples: Sequence[Sample], calibration: Calibration) -> Kinds:
    """The figures that samples give.

    Args:
        samples: of all kinds, others among them.
        calibration: what else was fitted to them.
    """
    by_kind: dict[str, list[Sample]] = {}
    for s in samples:
        kind = s.name if s.what == "convolution" else f"{s.what} of {s.name}" if s.what == "features" else s.what
        by_kind.setdefault(kind, []).append(s)
    kinds = {k: by_kind.get(k, []) for k in _KINDS}

    def busy(s: Sample) -> float:
        return busy_s(s, calibration.call_s, calibration.launch_s)

    peak_flops = dict(calibration.products)["f32"].peak
    convolution, gradient = (_convolution(kinds[k], busy, peak_flops) for k in ("convolution", "kernel gradient"))
    return Kinds(
        convolution,
        gradient,
        _features(kinds["features of convolution"], busy, peak_flops, convolution),
        _features(kinds["features of kernel gradient"], busy, peak_flops, gradient),
        _images(kinds["images"], busy),
        _by_side(kinds["reorder"], busy, calibration.memory),
        _by_side(kinds["reduction"], busy, calibration.memory),
        _first_touch(kinds["first touch"], busy, calibration.memory),
        _functions(kinds["function"], busy),
        tuple((k, median_spread(some)) for k, some in kinds.items() if some),
    )


def _convolution(samples: Sequence[Sample], busy: Callable[[Sample], float], peak_flops: float) -> Curve | None:
    if not samples:
        return None
    rate = rate_of(samples, busy)
    return Curve(tuple((n, _share(e * rate.peak, peak_flops)) for n, e in rate.efficiency.points))


def _features(
    samples: Sequence[Sample], busy: Callable[[Sample], float], peak_flops: float, many: Curve | None
) -> Curve | None:
    if not samples or many is None:
        return None
    points = {s.count: _share(s.amount / busy(s), peak_flops * many.at(s.amount)) for s in samples}
    return Curve(tuple((float(n), share) for n, share in sorted(points.items())))


def _images(samples: Sequence[Sample], busy: Callable[[Sample], float]) -> Curve | None:
    rates = {s.count: s.amount / busy(s) for s in samples}
    most = rates[max(rates)] if rates else 0.0
    return Curve(tuple((float(n), _share(rate, most)) for n, rate in sorted(rates.items()))) if rates else None


def _by_side(samples: Sequence[Sample], busy: Callable[[Sample], float], memory: Rate) -> Curve | None:
    points = {s.side_bytes: _share(s.amount / busy(s), memory.peak) for s in samples}
    return Curve(tuple((float(n), share) for n, share in sorted(points.items()))) if points else None


def _share(reached: float, peak: float) -> float:
    return min(1.0, max(LEAST_EFFICIENCY, reached / peak))


def _first_touch(samples: Sequence[Sample], busy: Callable[[Sample], float], memory: Rate) -> float | None:
    """None also where writing new memory takes no longer."""
    longer = []
    for s in samples:
        rewrite_s = 2 * s.amount / (memory.peak * memory.efficiency.at(2 * s.amount))
        if busy(s) > rewrite_s:
            longer.append(s.amount / (busy(s) - rewrite_s))
    return statistics.median(longer) if longer else None


def _functions(samples: Sequence[Sample], busy: Callable[[Sample], float]) -> tuple[tuple[str, float], ...]:
    each_s = {s.name: busy(s) / s.amount for s in samples}
    plain_s = each_s.pop("", 0.0)
    longer_s = {name: s - plain_s for name, s in each_s.items() if s - plain_s > _LEAST_LONGER * plain_s}
    longer_s |= {name: longer_s[like] for name, like in _LIKE.items() if like in longer_s}
    return tuple(sorted(longer_s.items()))
