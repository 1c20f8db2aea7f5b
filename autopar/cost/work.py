"""Work of one operator on whole tensors, apart from how it is split."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from autopar.cluster import ConvolutionForm, ConvolutionKind
from autopar.cost.convolutions import Convolution
from autopar.cost.kernels import Matrices
from autopar.ir import Attr, Operator, TensorType

#: Primitives that `matrices_of` says the sizes of.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

Kind = Literal["", ConvolutionKind]
#: Features that kernels of convolutions compute together at least, on processors of many cores (tiles of cuDNN's).
_LEAST_COLUMNS = 32
#: Rates of float32 products by `jax.lax.Precision`. GPUs run the first on tensor cores (TF32) and the second on none;
#: TPUs take three and six passes in bf16.
_PRECISIONS: Mapping[Attr, str] = MappingProxyType({"HIGH": "f32_high", "HIGHEST": "f32_highest"})
#: Of the core of attention: nothing, all scores, those that a causal mask leaves.
Core = Literal["", "whole", "causal"]


@dataclass(frozen=True)
class KernelWork:
    """FLOPs and bytes of one operator on whole tensors.

    Args:
        flops: FLOPs.
        bytes: bytes that it reads and writes.
        dtype: jaxpr name of the dtype that it computes in.
        kind: what decides how much of the peak it reaches, if a device tells these apart.
        function: primitive of an elementwise function, or "".
        elements: of the function.
        reordered: (bytes read, bytes between elements that come to lie side by side) of each operand that must be
            brought into another order first; see `autopar.cost.orders`.
        copied: the number of the operand that each of ``reordered`` is.
        run_bytes: of a reduction, the bytes that lie side by side and go into one result; 0 of others.
        fused: it runs inside of the kernel of who reads it.
        core: whether it is of the core of attention, which is one kernel in some programs; see `autopar.ir.attention`.
        backward: whether it is of the backward pass.
        convolution: sizes of a convolution on one device; None where they are not known, and of others.
    """

    flops: float
    bytes: float
    dtype: str
    kind: Kind = ""
    function: str = ""
    elements: float = 0.0
    reordered: tuple[tuple[float, int], ...] = ()
    copied: tuple[int, ...] = ()
    run_bytes: int = 0
    fused: bool = False
    core: Core = ""
    backward: bool = False
    convolution: Convolution | None = None


@dataclass(frozen=True)
class LeastWork:
    """Lower bound of the FLOPs and bytes of one operator, wherever it runs and whatever is fused into it.

    Args:
        flops: FLOPs of the whole.
        bytes: bytes that the whole reads and writes.
        dtypes: jaxpr names of those that it may compute in.
        kind: as of `KernelWork`.
        product: sizes of the whole where it is a product.
        aligned: least sizes at which rows of that product are aligned, see `ProductDims.aligned`; None where they may
            be as it is.
        starts: whether it starts a kernel of its own in any case.
        spatial_dims: of a convolution; 0 of others.
        form: of a convolution whose operand has no fewer places than the kernel (`autopar.cost.convolutions`).
        met_share: share of a convolution's multiplications that loops do.
    """

    flops: float
    bytes: float
    dtypes: tuple[str, ...]
    kind: Kind = ""
    product: Matrices | None = None
    aligned: Matrices | None = None
    starts: bool = True
    spatial_dims: int = 0
    form: ConvolutionForm = "windows"
    met_share: float = 1.0

    def times(self, count: int) -> LeastWork:
        """The work of so many as one operator on a stack."""
        product, aligned = (m and m.times(count) for m in (self.product, self.aligned))
        return replace(self, flops=count * self.flops, bytes=count * self.bytes, product=product, aligned=aligned)


def kind_of(op: Operator, operand_types: Sequence[TensorType]) -> Kind:
    """The kind of `KernelWork` that ``op`` does.

    Args:
        op: the operator; ``conv_general_dilated`` has the attributes ``rhs_spec`` and ``out_spec``.
        operand_types: type of each operand.
    """
    if op.primitive != "conv_general_dilated":
        return ""
    result = op.results[0].type.shape
    window = [operand_types[1].shape[d] for d in op.ints("rhs_spec")[2:]]
    out = [result[d] for d in op.ints("out_spec")[2:]]
    return "kernel gradient" if sum(w > o for w, o in zip(window, out, strict=True)) > len(out) / 2 else "convolution"


@dataclass(frozen=True, slots=True)
class ProductDims:
    """Dims of the matrices that a product or convolution multiplies: of each its size, and whether it may be split.

    Args:
        batch: dims that both operands and the result have.
        rows: those of the left operand and the result.
        columns: those of the right operand and the result.
        depth: those that are summed over.
        elements: of operands and result.
        done: as of `Matrices`.
    """

    batch: tuple[tuple[int, bool], ...]
    rows: tuple[tuple[int, bool], ...]
    columns: tuple[tuple[int, bool], ...]
    depth: tuple[tuple[int, bool], ...]
    elements: int
    done: float = 1.0

    @staticmethod
    def of(op: Operator, operand_shapes: Sequence[Sequence[int]], result_shape: Sequence[int]) -> ProductDims | None:
        """The dims of an operator; None where it is neither product nor convolution.

        A convolution multiplies its windows, one a row, by its kernels, one a column, in whole tiles of columns. The
        smaller of its window and its result's spatial dim is never split (`autopar.sharding.rules.conv`). Kernels for
        gradients of convolutions with strides leave the zeros out that stand between elements of the operand.

        Args:
            op: the operator; ``dot_general`` has the attribute ``dimension_numbers``, ``conv_general_dilated`` has
                ``rhs_spec``, ``out_spec`` and ``lhs_dilation``.
            operand_shapes: shape of each operand.
            result_shape: shape of the result.
        """
        elements = sum(math.prod(shape) for shape in (*operand_shapes[:2], result_shape))
        if op.primitive == "dot_general":
            numbers = op.attr("dimension_numbers")
            if not isinstance(numbers, tuple) or len(numbers) != 2:
                raise TypeError(f"not dimension numbers: {numbers!r}")
            (left, right), (left_shared, right_shared) = (_pairs(part) for part in numbers)
            lhs, rhs = operand_shapes[:2]
            left_free = tuple((size, True) for d, size in enumerate(lhs) if d not in (*left, *left_shared))
            right_free = tuple((size, True) for d, size in enumerate(rhs) if d not in (*right, *right_shared))
            batch, summed = (tuple((lhs[d], True) for d in dims) for dims in (left_shared, left))
            return ProductDims(batch, left_free, right_free, summed, elements)
        if op.primitive != "conv_general_dilated":
            return None
        kernel, specs = operand_shapes[1], (op.ints("rhs_spec"), op.ints("out_spec"))
        spatial = [(kernel[a], result_shape[b]) for a, b in zip(*(spec[2:] for spec in specs), strict=True)]
        tiles = -(-max(1, kernel[specs[0][0]]) // _LEAST_COLUMNS)
        windows = tuple((count, count >= taps) for taps, count in spatial)
        taken = tuple((taps, taps > count) for taps, count in spatial)
        rows, depth = (result_shape[specs[1][0]], True), (kernel[specs[0][1]], True)
        columns, done = ((tiles * _LEAST_COLUMNS, True),), 1.0 / math.prod(op.ints("lhs_dilation"))
        return ProductDims((), (rows, *windows), columns, (depth, *taken), elements, done)

    def matrices(self, width: float) -> Matrices:
        """The matrix products, of elements of ``width`` bytes."""
        batch, m, n, k = (math.prod(size for size, _ in d) for d in (self.batch, self.rows, self.columns, self.depth))
        return Matrices(batch, float(m), float(n), k, width, self.elements, self.done)

    def aligned(self, width: float, parts: int) -> Matrices | None:
        """The least sizes, padding included, at which rows on a device are aligned; None where they may be as they are.

        Rows of ``s`` elements are aligned where ``s`` is 1 or a multiple of 16 bytes (`Matrices.misaligned`). Equal
        parts of what is not aligned are not either, but for parts of one element: only padding helps. A dim of d
        elements in parts of a multiple of u takes at least ceil(d / u) u elements, and has two parts or more.

        Args:
            width: bytes of an element of the operands.
            parts: devices times microbatches, at most, that share the operator.

        Returns:
            sizes of which one is infinite where nothing aligns it.
        """
        bits = round(8 * width)
        unit = math.lcm(128, bits) // bits
        sizes = [_aligned_size(dims, unit, parts) for dims in (self.rows, self.columns, self.depth)]
        if all(size is None for size in sizes):
            return None
        product = self.matrices(width)
        m, n, k = (
            old if new is None else new for old, new in zip((product.m, product.n, product.k), sizes, strict=True)
        )
        return replace(product, m=m, n=n, k=k)


def product_dtype(op: Operator, dtype: str) -> str:
    """The rate of `Device.flops` at which a product of float32 runs, by its precision; other dtypes have their own.

    Args:
        op: a product, convolution or attention in blocks; its attribute ``precision`` is that of jax: a level for each
            operand, or the name of a `jax.lax.DotAlgorithmPreset`, as ``BF16_BF16_F32_X3``.
        dtype: jaxpr name of the dtype of its operands.
    """
    precision = dict(op.attrs).get("precision")
    if dtype != "f32" or precision is None:
        return dtype
    if isinstance(precision, tuple):
        return max((_PRECISIONS.get(p, dtype) for p in precision), default=dtype)
    algorithm = re.fullmatch(r"(TF32|BF16|F16|F32|F64)_.*?(_X\d)?", str(precision))
    if algorithm is None:
        return _PRECISIONS.get(precision, dtype)
    name, passes = algorithm[1].lower(), (algorithm[2] or "").lower()
    return {"tf32": "f32", "f32": "f32_highest"}.get(name, name) + passes


def matrices_of(
    op: Operator, operand_shapes: Sequence[Sequence[int]], result_shape: Sequence[int], width: float
) -> Matrices | None:
    """The matrix products that a product or convolution is, of shapes on one device; None for other operators.

    Args:
        op, operand_shapes, result_shape: as of `ProductDims.of`.
        width: bytes of an element of the operands.
    """
    dims = ProductDims.of(op, operand_shapes, result_shape)
    return None if dims is None else dims.matrices(width)


def _aligned_size(dims: Sequence[tuple[int, bool]], unit: int, parts: int) -> float | None:
    """The least padded size of some dims whose part on a device is a multiple of ``unit``; None where none is padded.

    Args:
        dims: (size, whether it may be split).
        unit: elements, a power of two.
        parts: of the whole at most.
    """
    whole = math.prod(size for size, _ in dims)
    if whole % unit == 0 or whole == 1 or (whole <= parts and all(splits or size == 1 for size, splits in dims)):
        return None
    least = {1: 1.0}  # by powers of two that divide the part
    for size, splits in dims:
        options = [(size & -size, float(size))]
        if splits:
            powers = [2**e for e in range(1, unit.bit_length()) if 2**e <= -(-size // 2)]
            options += [(power, float(-(-size // power) * power)) for power in powers]
        padded_to: dict[int, float] = {}
        for had, before in least.items():
            for power, padded in options:
                divides = min(unit, had * power)
                padded_to[divides] = min(padded_to.get(divides, math.inf), before * padded)
        least = padded_to
    return least.get(unit, math.inf)


def _pairs(part: Attr) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(part, tuple) or len(part) != 2:
        raise TypeError(f"not dims of two operands: {part!r}")
    left, right = (tuple(d for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else () for dims in part)
    return left, right
