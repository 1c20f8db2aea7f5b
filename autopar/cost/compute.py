"""FLOPs and bytes of operators, the roofline that turns them into seconds, and FLOPs of products as written (MFU)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from autopar.cluster import Curve, Device
from autopar.cost.attention import ATTENTIONS, attention_flops, score_traffic_bytes, score_width
from autopar.cost.work import PRODUCTS
from autopar.ir import Attr, Graph, Operator, TensorType
from autopar.ir.loops import runs_inside
from autopar.ir.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    INDEX_REDUCTIONS,
    REDUCTIONS,
    SCATTERS,
    SLICES,
    VIEWS,
)

# One operation an element of the (first) operand.
_OVER_OPERANDS = REDUCTIONS | INDEX_REDUCTIONS | CUMULATIVE | {"reduce"}
_COUNTED = PRODUCTS | ATTENTIONS | {"ragged_dot", "ragged_dot_general"}


def _pair(value: Attr) -> tuple[Attr, Attr]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"not a pair: {value!r}")
    return value[0], value[1]


def _sizes(type: TensorType, dims: Attr) -> int:
    """Product of the sizes of ``dims`` of a tensor."""
    if not isinstance(dims, tuple):
        raise TypeError(f"not dims: {dims!r}")
    return math.prod(type.shape[d] for d in dims if isinstance(d, int))


def _dot_flops(op: Operator, lhs: TensorType, rhs: TensorType) -> float:
    contract, batch = _pair(op.attr("dimension_numbers"))
    _, rhs_contract = _pair(contract)
    _, rhs_batch = _pair(batch)
    shared = _sizes(rhs, rhs_contract) * _sizes(rhs, rhs_batch)
    return 2.0 * lhs.size * (rhs.size / shared if shared else 0)


def _conv_flops(op: Operator, rhs: TensorType) -> float:
    # The kernel's own in-feature dim holds the features of one group, so groups need no further division.
    _, in_features, *spatial = op.ints("rhs_spec")
    return 2.0 * op.results[0].type.size * rhs.shape[in_features] * math.prod(rhs.shape[d] for d in spatial)


def operator_flops(op: Operator, operand_types: Sequence[TensorType]) -> float:
    """FLOPs of one operator on whole tensors, its regions not included.

    A matrix product does 2 x batch x contracting x free sizes; a convolution 2 x output size x kernel spatial
    size x in-features a group; elementwise operators one an element of the result; reductions and cumulative
    ones an element of the operand (windowed ones the window's size an element of the result); scatters that
    combine one an element of the update; a polynomial a product and a sum for each coefficient but the last;
    factorizations and attention in blocks as in `autopar.cost.compute` and `autopar.cost.attention`; the rest
    none.

    Args:
        op: the operator; ``dot_general`` has the attribute ``dimension_numbers``, ``conv_general_dilated``
            ``rhs_spec``.
        operand_types: type of each operand.
    """
    name = op.primitive
    if name in ATTENTIONS:
        return attention_flops(op, [t.shape for t in operand_types])
    if name == "dot_general":
        return _dot_flops(op, operand_types[0], operand_types[1])
    if name in ("ragged_dot", "ragged_dot_general"):  # every row of the left meets one group of the right
        return 2.0 * operand_types[0].size * op.results[0].type.shape[-1]
    if name == "conv_general_dilated":
        return _conv_flops(op, operand_types[1])
    if name in ELEMENTWISE:
        return float(op.results[0].type.size)
    if name == "polynomial":  # of the first operand; the others are the coefficients
        return 2.0 * op.results[0].type.size * max(0, len(operand_types) - 2)
    if name.startswith("reduce_window"):
        return float(op.results[0].type.size * math.prod(op.ints("window_dimensions")))
    if name in _OVER_OPERANDS:
        return float(operand_types[0].size)
    if name in SCATTERS and name != "scatter":
        return float(operand_types[2].size)
    return factorization_flops(op, operand_types)


def as_flops(flops: float, moved: float) -> float:
    """FLOPs and bytes as FLOPs alone, by the rates of an A100 in float32: for choices that come before a cluster.

    A rule that asked for fewer bytes as well left four layers of width 1024 with 4096 examples at 0.478 ms, predicted,
    in place of 0.368: a gradient of low rank reads the examples twice, for 57 times fewer FLOPs.

    Args:
        flops: of an operator.
        moved: bytes that it reads and writes.
    """
    return flops + 12.5 * moved


def total_flops(graph: Graph, op: Operator) -> float:
    """FLOPs of one run of an operator with all that its regions do, as often as they run (`runs_inside`).

    Args:
        graph: the graph that ``op`` is in.
        op: the operator.
    """
    if not op.regions or op.primitive in ATTENTIONS:
        return operator_flops(op, graph.operand_types(op))
    runs = runs_inside(op)
    return sum(runs * sum(total_flops(region, inner) for inner in region.operators) for _, region in op.regions)


def operator_bytes(op: Operator, operand_types: Sequence[TensorType]) -> float:
    """Bytes that one operator reads and writes, as if it were run by itself on whole tensors.

    Each different operand is read and each result written once, except: views move nothing, slices and gathers
    read as much as they return, updates and scatters read and write as much as their update, and operators
    with regions leave it to them.

    Args:
        op: the operator.
        operand_types: type of each operand.
    """
    name = op.primitive
    results = sum(v.type.nbytes for v in op.results)
    if name in ATTENTIONS:
        scores = score_traffic_bytes(op, [t.shape for t in operand_types], score_width(op))
        return float(results + sum(t.nbytes for t in operand_types) + scores)
    if op.regions or name in VIEWS:
        return 0.0
    if name in SLICES:
        return float(2 * results + sum(t.nbytes for t in operand_types[1:]))
    if name == "dynamic_update_slice" or name in SCATTERS:
        update = operand_types[1 if name == "dynamic_update_slice" else 2]
        return float(update.nbytes + sum(t.nbytes for t in operand_types[1:]))
    read = dict(zip(op.operands, operand_types, strict=True))
    return float(results + sum(t.nbytes for t in read.values()))


def roofline_s(flops: float, bytes: float, dtype: str, device: Device, efficiency: Curve | None = None) -> float:
    """Seconds of work that either computing or memory limits (Williams et al., "Roofline", 2009).

    Args:
        flops: FLOPs of one device.
        bytes: bytes that one device reads and writes.
        dtype: jaxpr name of the dtype that it computes in; one that the device does not list runs as f32.
        device: peaks, and the curves of what is reached of them.
        efficiency: the curve of what is reached of the peak by FLOPs, instead of the device's own.
    """
    reached = device.compute_efficiency if efficiency is None else efficiency
    compute_s = flops / (device.flops(dtype) * reached.at(flops)) if flops else 0.0
    memory_s = bytes / (device.memory_bandwidth * device.memory_efficiency.at(bytes)) if bytes else 0.0
    return max(compute_s, memory_s)


def least_roofline_s(
    flops: float, bytes: float, dtype: str, device: Device, parts: float, efficiency: Curve | None = None
) -> float:
    """Lower bound of `roofline_s` for one of ``parts`` equal parts of some work, or for a larger part.

    Args:
        flops: FLOPs of the whole.
        bytes: bytes that the whole reads and writes.
        dtype: see `roofline_s`.
        device: likewise.
        parts: devices times microbatches, at most, that share it.
        efficiency: see `roofline_s`.
    """
    reached = device.compute_efficiency if efficiency is None else efficiency
    compute_s = _least_amount(reached, flops / parts, flops) / device.flops(dtype)
    return max(compute_s, _least_amount(device.memory_efficiency, bytes / parts, bytes) / device.memory_bandwidth)


def _least_amount(curve: Curve, least: float, most: float) -> float:
    """The least amount over the best share that is reached up to it, of amounts between two.

    A share that rises steeply makes a larger amount take less time: where the share is the slope of its segment.
    """
    if not least:
        return 0.0
    amounts = [least, *(x for x, _ in curve.points if least < x <= most)]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve.points):
        slope = (y1 - y0) / math.log(x1 / x0)
        if slope > 0 and least < (flat := x0 * math.exp(min((slope - y0) / slope, 700.0))) <= min(x1, most):
            amounts.append(flat)
    return min(a / max([curve.at(a), *(y for x, y in curve.points if x <= a)]) for a in amounts)


def _qr(long: float, short: float) -> float:
    return 2 * short**2 * (long - short / 3)


# From the longer and the shorter side of a matrix to FLOPs.
_OF_MATRIX: Mapping[str, Callable[[float, float], float]] = MappingProxyType(
    {
        "cholesky": lambda long, short: short**3 / 3,
        "eig": lambda long, short: 25 * short**3,
        "eigh": lambda long, short: 9 * short**3,
        "geqp3": _qr,
        "geqrf": _qr,
        "hessenberg": lambda long, short: 10 * short**3 / 3,
        "householder_product": _qr,
        "lu": lambda long, short: short**2 * (long - short / 3),
        "qr": lambda long, short: 2 * _qr(long, short),
        "schur": lambda long, short: 25 * short**3,
        "svd": lambda long, short: 6 * long * short**2 + 20 * short**3,
        "tridiagonal": lambda long, short: 4 * short**3 / 3,
    }
)


def factorization_flops(op: Operator, operand_types: Sequence[TensorType]) -> float:
    """FLOPs of one operator on whole tensors; 0 of one that is no factorization, solve or Fourier transform.

    Args:
        op: the operator; ``fft`` has the attribute ``fft_lengths``.
        operand_types: type of each operand: matrices in the last two dims.
    """
    name = op.primitive
    if name in _OF_MATRIX and operand_types[0].rank >= 2:
        *batch, rows, columns = operand_types[0].shape
        return math.prod(batch) * _OF_MATRIX[name](max(rows, columns), min(rows, columns))
    if name == "triangular_solve" and operand_types[0].rank >= 2:
        return float(operand_types[0].shape[-1] * operand_types[1].size)
    if name == "ormqr":
        return 4.0 * operand_types[1].shape[-1] * operand_types[2].size
    if name == "symmetric_product":
        return 2.0 * operand_types[0].shape[-1] * operand_types[1].size
    if name == "fft":
        points = math.prod(op.ints("fft_lengths"))
        return 5.0 * op.results[0].type.size * math.log2(points) if points > 1 else 0.0
    return 0.0


def product_flops(graph: Graph) -> tuple[tuple[str, float], ...]:
    """Counts the FLOPs of products of one run of a graph by dtype of their left operand, loops and attention included.

    Divided by the peak rates of the devices it is the least time of a step, whose share of the step time is the model
    FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B). Products that the program itself recomputes count.

    Args:
        graph: the step as it was written.

    Returns:
        (dtype, FLOPs), in order of dtypes.
    """
    flops: dict[str, float] = {}
    for op in graph.operators:
        if op.primitive in _COUNTED:
            dtype = graph.operand_types(op)[0].dtype
            flops[dtype] = flops.get(dtype, 0.0) + operator_flops(op, graph.operand_types(op))
        elif op.regions:
            runs = runs_inside(op)
            for _, region in op.regions:
                for dtype, inner in product_flops(region):
                    flops[dtype] = flops.get(dtype, 0.0) + runs * inner
    return tuple(sorted(flops.items()))
