"""`Device`: what one accelerator can do, with `Curve` for how much of a peak is reached."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.cluster.checks import fraction, positive, text, whole
from autopar.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Curve:
    """The fraction of a peak that is reached, as a function of the amount of work.

    Between two points the fraction is linear in the logarithm of the amount; outside of them it is that of
    the nearest point. One point is a constant.

    Args:
        points: (amount, fraction) with amounts rising; amounts in FLOPs or bytes of one operator, fractions
            in (0, 1].
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        if not self.points:
            raise ClusterError("an efficiency curve has no points", remedy="give one fraction, or [amount, fraction]s")
        for amount, part in self.points:
            positive("amount of an efficiency curve", amount)
            fraction("fraction of an efficiency curve", part)
        amounts = [amount for amount, _ in self.points]
        if any(a >= b for a, b in itertools.pairwise(amounts)):
            raise ClusterError(f"the amounts of an efficiency curve must rise: {amounts}", remedy="sort its points")
        if len(self.points) == 1:  # equal curves compare equal
            object.__setattr__(self, "points", ((1.0, self.points[0][1]),))

    @staticmethod
    def constant(value: float) -> Curve:
        """The curve that is ``value`` (in (0, 1]) everywhere."""
        return Curve(((1.0, value),))

    def at(self, amount: float) -> float:
        """The fraction reached with ``amount`` of work (FLOPs or bytes, as the curve's)."""
        i = bisect_right(self.points, amount, key=lambda p: p[0])
        if i == 0:
            return self.points[0][1]
        if i == len(self.points):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return y0 + (y1 - y0) * math.log(amount / x0) / math.log(x1 / x0)


#: "kernel gradient" where the window is larger than the result.
ConvolutionKind = Literal["convolution", "kernel gradient"]
#: How compilers for CPUs write convolutions, see `autopar.cost.convolutions`.
ConvolutionForm = Literal["windows", "dilated", "loop"]
#: Names of the coefficients of a `ConvolutionRate`.
COEFFICIENTS = ("multiplication_s", "window_s", "kernel_s", "result_s", "scattered_s", "narrow_run_s")


@dataclass(frozen=True, slots=True)
class ConvolutionRate:
    """Seconds of convolutions on a device, most of which are matrix products of windows and kernels.

    A convolution with m windows of k elements and n features takes ``multiplication_s`` m k n + ``window_s`` m k +
    ``kernel_s`` k n + ``result_s`` m n: windows and kernels are packed before they are multiplied. ``scattered_s``
    counts for elements of windows that are read one by one, and ``narrow_run_s`` for places of windows, as far as
    features are few (`autopar.cost.Convolution`).

    Args:
        kind: "convolution", or "kernel gradient" where the window is larger than the result.
        spatial_dims: spatial dims that it holds for, at most.
        multiplication_s: seconds of one multiplication and addition.
        window_s: seconds of an element of the windows.
        kernel_s: seconds of an element of the kernels.
        result_s: seconds of an element of the result.
        scattered_s: seconds that an element of the windows takes longer that is read alone.
        narrow_run_s: seconds that a place of a window takes longer at most where the result has few features.
        form: how compilers write them: as "windows", or windows with "dilated" operands, or as a "loop" over elements,
            in which only ``multiplication_s`` and ``result_s`` count.

    Raises:
        ClusterError: a value is impossible; it names the field.
    """

    kind: ConvolutionKind
    spatial_dims: int
    multiplication_s: float
    window_s: float = 0.0
    kernel_s: float = 0.0
    result_s: float = 0.0
    scattered_s: float = 0.0
    narrow_run_s: float = 0.0
    form: ConvolutionForm = "windows"

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConvolutionKind):
            raise ClusterError(
                f"ConvolutionRate.kind is {self.kind!r}", remedy="one of 'convolution' and 'kernel gradient'"
            )
        if self.form not in get_args(ConvolutionForm):
            known = ", ".join(map(repr, get_args(ConvolutionForm)))
            raise ClusterError(f"ConvolutionRate.form is {self.form!r}", remedy=f"one of {known}")
        object.__setattr__(self, "spatial_dims", whole("ConvolutionRate.spatial_dims", self.spatial_dims))
        for name in COEFFICIENTS:
            seconds = positive(f"ConvolutionRate.{name}", getattr(self, name), zero=name != "multiplication_s")
            object.__setattr__(self, name, seconds)

    @property
    def seconds(self) -> tuple[float, ...]:
        """The coefficients, in their order."""
        return tuple(getattr(self, name) for name in COEFFICIENTS)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Args:
        kind: name that a person knows, as ``A100 SXM 80GB``.
        memory_bytes: bytes of its memory.
        memory_bandwidth: bytes/s of its memory, peak.
        peak_flops: (dtype name as jaxprs print it, FLOP/s), dense peak; a mapping is taken too. It must have
            ``f32``, which stands for every dtype that is not listed. ``f32_high`` and ``f32_highest`` are of
            float32 products of these precisions (`jax.lax.Precision`).
        compute_efficiency: fraction of ``peak_flops`` reached, by FLOPs of an operator.
        memory_efficiency: fraction of ``memory_bandwidth`` reached, by bytes of an operator.
        launch_s: seconds that starting one operator costs.
        jax_kinds: what jax calls such devices in ``device_kind``; `Cluster.local` looks for them.
        convolution_efficiency: fraction of ``peak_flops`` reached by convolutions, by FLOPs; None: as other operators.
        kernel_gradient_efficiency: likewise of those whose window is larger than their result, as in gradients of
            kernels.
        convolutions: measured seconds of convolutions by their sizes, in place of peak and efficiency; empty: those.
        reorder_efficiency: fraction of ``memory_bandwidth`` reached where a product's or convolution's operand must be
            brought into another order first, by the bytes between elements that come to lie side by side; None: it
            takes no time.
        reduction_efficiency: fraction of ``memory_bandwidth`` that reductions reach at most, by the bytes that lie side
            by side and go into the same result, or each into its own; None: as other operators.
        first_touch_bandwidth: bytes/s of writing memory for the first time that a step got from the system; None: it
            takes no time.
        function_s: (primitive, seconds an element) of elementwise functions that take longer than moving their
            operands; a mapping is taken too.

    Raises:
        ClusterError: a value is impossible; it names the field.
    """

    kind: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    compute_efficiency: Curve = Curve(((1.0, 1.0),))
    memory_efficiency: Curve = Curve(((1.0, 1.0),))
    launch_s: float = 0.0
    jax_kinds: tuple[str, ...] = ()
    convolution_efficiency: Curve | None = None
    kernel_gradient_efficiency: Curve | None = None
    convolutions: tuple[ConvolutionRate, ...] = ()
    reorder_efficiency: Curve | None = None
    reduction_efficiency: Curve | None = None
    first_touch_bandwidth: float | None = None
    function_s: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        text("Device.kind", self.kind)
        object.__setattr__(self, "memory_bytes", whole("Device.memory_bytes", self.memory_bytes))
        object.__setattr__(self, "memory_bandwidth", positive("Device.memory_bandwidth", self.memory_bandwidth))
        pairs = self.peak_flops.items() if isinstance(self.peak_flops, Mapping) else self.peak_flops
        rates = {text("a dtype of Device.peak_flops", d): positive(f"Device.peak_flops.{d}", r) for d, r in pairs}
        object.__setattr__(self, "peak_flops", tuple(sorted(rates.items())))
        if "f32" not in rates:
            raise ClusterError(
                f"Device.peak_flops of {self.kind!r} has no f32, only {sorted(rates)}",
                cause="f32 is the rate of every dtype that is not listed",
                remedy="add f32 to it",
            )
        object.__setattr__(self, "launch_s", positive("Device.launch_s", self.launch_s, zero=True))
        object.__setattr__(self, "jax_kinds", tuple(self.jax_kinds))
        object.__setattr__(self, "convolutions", tuple(self.convolutions))
        if self.first_touch_bandwidth is not None:
            touched = positive("Device.first_touch_bandwidth", self.first_touch_bandwidth)
            object.__setattr__(self, "first_touch_bandwidth", touched)
        named = self.function_s.items() if isinstance(self.function_s, Mapping) else self.function_s
        seconds = {text("a name of Device.function_s", n): positive(f"Device.function_s.{n}", s) for n, s in named}
        object.__setattr__(self, "function_s", tuple(sorted(seconds.items())))

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype`` (a jaxpr's name, as ``bf16``); that of ``f32`` where it is not listed.

        A product that takes several passes has their number at the end, as ``bf16_x3``.
        """
        name, _, passes = dtype.partition("_x")
        rate = next((r for d, r in self.peak_flops if d == name), None)
        if rate is None:
            rate = next(r for d, r in self.peak_flops if d == "f32")
        return rate / int(passes) if passes else rate
