"""Figures of the kinds of work that neither FLOPs nor bytes explain, from measured times.

convolutions    seconds of a multiplication, of an element of windows, kernels and results, of one that is packed alone,
                and of a place of a window, which fit convolutions of drawn sizes best; by the number of spatial dims,
                kernels' gradients and dilated operands by themselves, and loops of all kinds together
other orders    bytes of memory bandwidth reached by a copy that brings elements side by side that lay apart
short sums      likewise of sums, by the bytes that lie side by side and go into one result
functions       seconds an element beyond those of a multiplication and an addition
new memory      bytes/s of writing memory that the system just gave, beyond the seconds of writing it again
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

import numpy as np

from autopar.cluster import COEFFICIENTS, ConvolutionForm, ConvolutionKind, ConvolutionRate, Curve
from autopar.cost.calibration import LEAST_EFFICIENCY, Calibration, Rate, Sample, busy_s, median_spread
from autopar.cost.convolutions import Convolution

#: Functions that are not measured take as long as these.
_LIKE: Mapping[str, str] = MappingProxyType(
    {"exp2": "exp", "expm1": "log1p", "log2": "log", "erfc": "erf", "tan": "sin"}
)
#: Of the seconds of a multiplication and an addition; a function that takes less longer is not told apart from them.
_LEAST_LONGER = 0.05
_KINDS = ("convolution", "kernel gradient", "reorder", "reduction", "function", "first touch")
#: Spatial dims of volumes. Sequences, images and volumes have rates of their own, as compilers have other kernels for
#: them: a rate of sequences and images together is further off for both.
MOST_DIMS = 3
#: Rounds of weights, and the relative error beyond which a sample counts less.
_ROUNDS, _LARGE_ERROR = 30, 0.3


@dataclass(frozen=True)
class Kinds:
    """Figures of kinds of work; None or empty where nothing was measured.

    Args:
        convolutions: rates of convolutions and of kernels' gradients.
        convolution_error: median relative error of their seconds.
        reorder: share of the bandwidth of memory by stride.
        reduction: likewise of sums by run.
        first_touch_bandwidth: bytes/s.
        function_s: (primitive, seconds an element).
        spreads: (kind, median spread of its measurements).
    """

    convolutions: tuple[ConvolutionRate, ...] = ()
    convolution_error: float = 0.0
    reorder: Curve | None = None
    reduction: Curve | None = None
    first_touch_bandwidth: float | None = None
    function_s: tuple[tuple[str, float], ...] = ()
    spreads: tuple[tuple[str, float], ...] = ()


def fit_kinds(samples: Sequence[Sample], calibration: Calibration) -> Kinds:
    """Figures of convolutions, reorders, reductions, new memory and functions, fitted to measured times.

    Args:
        samples: measured times of operators; those of other kinds of operators are left out.
        calibration: figures that were fitted before: peaks, memory, seconds of calls and launches.
    """
    by_kind: dict[str, list[Sample]] = {}
    for s in samples:
        by_kind.setdefault(s.name if s.what == "convolution" else s.what, []).append(s)
    kinds = {k: by_kind.get(k, []) for k in _KINDS}

    def busy(s: Sample) -> float:
        return busy_s(s, calibration.call_s, calibration.launch_s)

    peak_flops = dict(calibration.products)["f32"].peak
    rates, error = _convolutions([s for s in samples if s.what == "convolution"], busy, peak_flops)
    return Kinds(
        rates,
        error,
        _by_side(kinds["reorder"], busy, calibration.memory),
        _by_side(kinds["reduction"], busy, calibration.memory),
        _first_touch(kinds["first touch"], busy, calibration.memory),
        _functions(kinds["function"], busy),
        tuple((k, median_spread(some)) for k, some in kinds.items() if some),
    )


def _convolutions(
    samples: Sequence[Sample], busy: Callable[[Sample], float], peak_flops: float
) -> tuple[tuple[ConvolutionRate, ...], float]:
    """Rates of each kind, and the median relative error of the seconds that they give."""
    measured: dict[tuple[ConvolutionKind, ConvolutionForm, int], list[tuple[Convolution, float]]] = {}
    for s in samples:
        if s.convolution is not None:
            form = s.convolution.form
            kind: ConvolutionKind = "kernel gradient" if s.name == "kernel gradient" else "convolution"
            # There is one rate of loops, whatever they compute.
            kind, dims = ("convolution", MOST_DIMS) if form == "loop" else (kind, s.convolution.spatial_dims)
            measured.setdefault((kind, form, dims), []).append((s.convolution, busy(s)))
    rates: list[ConvolutionRate] = []
    errors: list[float] = []
    for (kind, form, dims), some in sorted(measured.items()):
        rates.append(rate := _rate(kind, form, dims, some, peak_flops))
        errors += [abs(sizes.seconds(rate) / seconds - 1) for sizes, seconds in some]
    return tuple(rates), statistics.median(errors) if errors else 0.0


def _rate(
    kind: ConvolutionKind,
    form: ConvolutionForm,
    dims: int,
    samples: Sequence[tuple[Convolution, float]],
    peak_flops: float,
) -> ConvolutionRate:
    """The rate whose ratios to the measured seconds are nearest to one.

    Minimizes sum of w (p - s)^2 / (p s) over nonnegative coefficients of p, with s the measured seconds: nearly the
    square of log(p / s). A multiplication takes no less than at the peak of products. Rounds of least squares take p of
    the round before. w is 1, less for large errors, since some convolutions have kernels of their own.
    """
    nnls = import_module("scipy.optimize").nnls
    sizes = np.array([c.amounts(form) for c, _ in samples])
    seconds = np.array([s for _, s in samples])
    scale = sizes.max(axis=0)
    scale[scale == 0] = 1.0  # of what no sample has, as windows of loops
    peak_s = 2 / peak_flops * sizes[:, 0]
    predicted = seconds
    beyond = np.zeros(sizes.shape[1])
    for _ in range(_ROUNDS):
        error = np.abs(np.log(predicted / seconds))
        weight = np.sqrt(np.minimum(1.0, _LARGE_ERROR / np.maximum(error, 1e-9)) / (predicted * seconds))
        beyond = nnls(sizes / scale * weight[:, None], (seconds - peak_s) * weight)[0] / scale
        predicted = peak_s + sizes @ beyond
    coefficients = {name: float(each_s) for name, each_s in zip(COEFFICIENTS, beyond, strict=True)}
    return ConvolutionRate(
        kind, dims, **coefficients | {"multiplication_s": 2 / peak_flops + float(beyond[0])}, form=form
    )


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
