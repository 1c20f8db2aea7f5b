"""StableHLO operations that move, cut, join and make arrays, as jax's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.frontend.stablehlo.reader import Operation, constant_of

_RNG = MappingProxyType({"DEFAULT": "default", "PHILOX": "philox", "THREE_FRY": "three_fry"})


def _broadcast(op: Operation, x: Any) -> Any:
    return lax.broadcast_in_dim(x, op.shapes[0], op.ints("broadcast_dimensions"))


def _constant(op: Operation) -> Any:
    value = constant_of(op)
    return jnp.broadcast_to(value, op.shapes[0]) if value.shape != op.shapes[0] else value


def _concatenate(op: Operation, *values: Any) -> Any:
    return lax.concatenate(values, op.integer("dimension"))


def _dynamic_slice(op: Operation, x: Any, *starts: Any) -> Any:
    return lax.dynamic_slice(x, starts, op.ints("slice_sizes"))


def _dynamic_update_slice(op: Operation, x: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(x, update, starts)


def _gather(op: Operation, x: Any, indices: Any) -> Any:
    n = op.numbers("dimension_numbers", "GatherDimensionNumbers")
    moved, indices = _index_last(indices, n.index_vector_dim)
    numbers = lax.GatherDimensionNumbers(
        tuple(n.offset_dims),
        tuple(n.collapsed_slice_dims),
        tuple(n.start_index_map),
        tuple(n.operand_batching_dims),
        tuple(d - (d > moved) for d in n.start_indices_batching_dims),
    )
    return lax.gather(
        x,
        indices,
        numbers,
        tuple(op.ints("slice_sizes")),
        indices_are_sorted=op.flag("indices_are_sorted"),
        mode=lax.GatherScatterMode.CLIP,
    )


def _index_last(indices: Any, dim: int) -> tuple[int, Any]:
    """Indices with the dim of index vectors last, as jax has them; the dim where it was."""
    if dim == indices.ndim:
        return dim, indices[..., None]
    return dim, jnp.moveaxis(indices, dim, -1) if dim != indices.ndim - 1 else indices


def _iota(op: Operation) -> Any:
    return lax.broadcasted_iota(op.dtypes[0], op.shapes[0], op.integer("iota_dimension"))


def _pad(op: Operation, x: Any, value: Any) -> Any:
    low, high = op.ints("edge_padding_low"), op.ints("edge_padding_high")
    inner = op.ints("interior_padding", [0] * len(low))
    return lax.pad(x, value, list(zip(low, high, inner, strict=True)))


def _reshape(op: Operation, x: Any) -> Any:
    return lax.reshape(x, op.shapes[0])


def _reverse(op: Operation, x: Any) -> Any:
    return lax.rev(x, op.ints("dimensions"))


def _rng_bits(op: Operation, state: Any) -> Any:
    algorithm = _RNG[op.word("rng_algorithm", "DEFAULT")]
    result = {"default": "RNG_DEFAULT", "philox": "RNG_PHILOX", "three_fry": "RNG_THREE_FRY"}[algorithm]
    return list(
        lax.rng_bit_generator(state, op.shapes[1], op.dtypes[1], algorithm=getattr(lax.RandomAlgorithm, result))
    )


def _slice(op: Operation, x: Any) -> Any:
    strides = op.ints("strides", [1] * x.ndim)
    return lax.slice(x, op.ints("start_indices"), op.ints("limit_indices"), None if set(strides) <= {1} else strides)


def _transpose(op: Operation, x: Any) -> Any:
    return lax.transpose(x, op.ints("permutation"))


def _top_k(op: Operation, x: Any) -> Any:
    return list(lax.top_k(x, op.integer("k")))


def _cholesky(op: Operation, x: Any) -> Any:
    lower = op.flag("lower")
    result = lax.linalg.cholesky(x if lower else jnp.conj(jnp.swapaxes(x, -1, -2)), symmetrize_input=False)
    return result if lower else jnp.conj(jnp.swapaxes(result, -1, -2))


def _triangular_solve(op: Operation, a: Any, b: Any) -> Any:
    turned = op.word("transpose_a", "NO_TRANSPOSE")
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=op.flag("left_side"),
        lower=op.flag("lower"),
        transpose_a=turned != "NO_TRANSPOSE",
        conjugate_a=turned == "ADJOINT",
        unit_diagonal=op.flag("unit_diagonal"),
    )


def _fft(op: Operation, x: Any) -> Any:
    return lax.fft(x, getattr(jax.lax.FftType, op.word("fft_type")), tuple(op.ints("fft_length")))


SHAPES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.broadcast_in_dim": _broadcast,
        "stablehlo.cholesky": _cholesky,
        "stablehlo.concatenate": _concatenate,
        "stablehlo.constant": _constant,
        "stablehlo.dynamic_slice": _dynamic_slice,
        "stablehlo.dynamic_update_slice": _dynamic_update_slice,
        "stablehlo.fft": _fft,
        "stablehlo.gather": _gather,
        "stablehlo.iota": _iota,
        "stablehlo.pad": _pad,
        "stablehlo.reshape": _reshape,
        "stablehlo.reverse": _reverse,
        "stablehlo.rng_bit_generator": _rng_bits,
        "stablehlo.slice": _slice,
        "stablehlo.transpose": _transpose,
        "stablehlo.triangular_solve": _triangular_solve,
        "chlo.top_k": _top_k,
    }
)
