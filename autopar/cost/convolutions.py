"""Sizes of convolutions on one device, by the forms in which XLA for CPUs writes them.

windows         a matrix product of windows, which are packed first, and kernels
dilated         the same with zeros between elements of the operand or the kernel, as in gradients of strides
loop            a loop over elements, in which an operand of fewer places than the kernel is taken as the kernel

Elements of windows are packed `_PACKED` at a time where all of these lie side by side, else one by one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.cluster import ConvolutionForm, ConvolutionRate
from autopar.ir import Operator

#: Float32 elements that are packed together, those of a vector of AVX.
_PACKED = 8
#: Features of a result below which libraries for CPUs take windows apart for each: 16 and 24 were told apart.
_WIDE = 24


@dataclass(frozen=True)
class Convolution:
    """Sizes of a convolution, a matrix product of windows and kernels (`autopar.cluster.ConvolutionRate`).

    Args:
        spatial_dims: dims that windows move over.
        multiplications: multiplications and additions.
        windows: elements of all windows that are packed; 0 of windows of one place, which are products as they are.
        kernels, results: elements of the kernels and of the result.
        scattered: elements of windows that are packed one by one; 0 of dilated ones, of which nearly all are.
        narrow_runs: places of all windows, times the share that the features lack of `_WIDE`; 0 of gradients of
            kernels of images whose last dim has no padding.
        form: how XLA for CPUs writes it.
        met: multiplications by an element of the operand, and not by its padding or a zero of its dilation.
    """

    spatial_dims: int
    multiplications: float
    windows: float
    kernels: float
    results: float
    scattered: float = 0.0
    narrow_runs: float = 0.0
    form: ConvolutionForm = "windows"
    met: float = 0.0

    def amounts(self, form: ConvolutionForm) -> tuple[float, ...]:
        """Amounts that the coefficients of a rate of a form count, in their order."""
        if form == "loop":
            return (self.met, 0.0, 0.0, self.results, 0.0, 0.0)
        return (self.multiplications, self.windows, self.kernels, self.results, self.scattered, self.narrow_runs)

    def seconds(self, rate: ConvolutionRate) -> float:
        """Seconds of one run."""
        return sum(each_s * amount for each_s, amount in zip(rate.seconds, self.amounts(rate.form), strict=True))

    @classmethod
    def of(
        cls,
        spatial_dims: int,
        windows: float,
        taps: int,
        taken: int,
        features: int,
        groups: int = 1,
        *,
        run: int | None = None,
        packs: bool = True,
        narrow: bool = True,
        form: ConvolutionForm = "windows",
        met_share: float = 1.0,
    ) -> Convolution:
        """The sizes of windows of ``taps`` places of ``taken`` elements each.

        Args:
            spatial_dims: dims that windows move over.
            windows: of one group.
            taps: places of a window.
            taken: features of the operand, or images that a kernel's gradient sums over.
            features: of the result, of one group.
            groups: of features or images.
            run: elements of a window that lie side by side; ``taken`` without it.
            packs: whether windows are packed.
            narrow: whether few features slow it down.
            form: how XLA for CPUs writes it.
            met_share: share of the multiplications that meet an element.
        """
        runs, run = windows * taps * groups, run or max(1, taken)
        multiplications = runs * taken * features
        return cls(
            spatial_dims,
            multiplications,
            runs * taken * packs,
            taps * taken * features * groups,
            windows * features * groups,
            runs * taken * min(1.0, _PACKED / run) if run % _PACKED and packs and form == "windows" else 0.0,
            runs * max(0.0, 1 - features / _WIDE) * narrow,
            form,
            multiplications * met_share,
        )


def convolution_of(
    op: Operator,
    operand_shapes: Sequence[Sequence[int]],
    result_shape: Sequence[int],
    *,
    met_share: float = 1.0,
    edges: Collection[int] = (),
) -> Convolution | None:
    """The sizes of a convolution of shapes on one device; None for other operators.

    XLA for CPUs takes gradients of kernels of few features by a slow way where the last dim of the images is padded: 2
    to 6 times as long for one image of 512 to 1,024 places, and the same for 24 features and more. Where it is not, the
    seconds of 8 to 32 features are those of windows and products alone, but with dilated kernels.

    Args:
        op: the operator; ``conv_general_dilated`` has the attributes ``lhs_spec``, ``rhs_spec``, ``out_spec``,
            ``padding``, ``window_strides``, ``lhs_dilation`` and ``rhs_dilation``.
        operand_shapes: shape of each operand on one device.
        result_shape: shape of the result on one device.
        met_share: of the whole operator (`met_share`).
        edges: dims of the first operand that come with the edges of neighbours, in place of padding.
    """
    if op.primitive != "conv_general_dilated":
        return None
    out, into, *window = op.ints("rhs_spec")
    batch, taken = op.ints("lhs_spec")[:2]
    images, kernel, results = operand_shapes[0], operand_shapes[1], math.prod(result_shape)
    # Groups of features, or of images, have windows of their own.
    groups = max(1, images[taken] // max(1, kernel[into]))
    groups *= max(1, images[batch] // max(1, result_shape[op.ints("out_spec")[0]]))
    taps, features = math.prod(kernel[d] for d in window), max(1, kernel[out] // groups)
    places = [result_shape[d] for d in op.ints("out_spec")[2:]]
    of_kernel = sum(kernel[w] > n for w, n in zip(window, places, strict=True)) > len(places) / 2
    last = max(range(len(window)), key=lambda n: op.ints("lhs_spec")[2 + n], default=0)
    last_is_whole = bool(window) and (op.ints("lhs_spec")[2 + last] in edges or max(_padding(op)[last]) <= 0)
    form = form_of(op, operand_shapes)
    one_place = taps == 1 and max(op.ints("window_strides"), default=1) == 1 and not any(map(any, _padding(op)))
    # Places of one dim alone are apart: its library takes them as rows of one place.
    in_a_row = kernel[window[last]] if len(window) > 1 else 1
    return Convolution.of(
        len(window),
        results / (features * groups),
        taps,
        kernel[into],
        features,
        groups,
        run=max(1, kernel[into] * in_a_row),
        packs=not one_place,
        narrow=not (of_kernel and last_is_whole and form == "windows"),
        form=form,
        met_share=met_share,
    )


def form_of(op: Operator, operand_shapes: Sequence[Sequence[int]]) -> ConvolutionForm:
    """The form in which XLA for CPUs writes a convolution of shapes on one device.

    It takes an operand that has fewer places than the kernel as the kernel, and the kernel reversed as the operand; its
    library computes no reversed windows.

    Args:
        op: a convolution, with attributes as of `convolution_of`.
        operand_shapes: shape of each operand on one device.
    """
    image_places, kernel_places = (
        math.prod(shape[d] for d in op.ints(spec)[2:])
        for shape, spec in zip(operand_shapes, ("lhs_spec", "rhs_spec"), strict=False)
    )
    grouped = op.integer("feature_group_count") > 1 or op.integer("batch_group_count") > 1
    if kernel_places > image_places and not grouped:
        return "loop"
    return "dilated" if is_dilated(op) else "windows"


def is_dilated(op: Operator) -> bool:
    """Whether a convolution has zeros between elements of its operand or its kernel."""
    return max((*op.ints("lhs_dilation"), *op.ints("rhs_dilation")), default=1) > 1


def met_share(op: Operator, operand_shapes: Sequence[Sequence[int]], result_shape: Sequence[int]) -> float:
    """Share of a convolution's multiplications whose factors are elements, neither padding nor zeros of a dilation.

    Args:
        op: a convolution, with attributes as of `convolution_of`.
        operand_shapes: shape of each operand.
        result_shape: shape of the result.
    """
    share = 1.0
    for n, (low, _) in enumerate(_padding(op)):
        sizes = (
            operand_shapes[0][op.ints("lhs_spec")[2 + n]],
            operand_shapes[1][op.ints("rhs_spec")[2 + n]],
            result_shape[op.ints("out_spec")[2 + n]],
        )
        steps = tuple(op.ints(name)[n] for name in ("window_strides", "rhs_dilation", "lhs_dilation"))
        share *= _met_of_dim(*sizes, *steps, low)
    return share


@lru_cache(maxsize=1024)
def _met_of_dim(size: int, taps: int, count: int, step: int, dilation: int, spread: int, low: int) -> float:
    at = np.arange(count)[:, None] * step + np.arange(taps)[None, :] * dilation - low
    met = (at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)
    return float(met.mean()) if met.size else 1.0


def _padding(op: Operator) -> list[tuple[int, int]]:
    padding: Any = op.attr("padding")
    return [(int(low), int(high)) for low, high in padding]
