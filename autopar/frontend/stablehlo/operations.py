"""StableHLO operations as jax's: elementwise, those that move and make arrays, those that combine elements.

`ELEMENTWISE`, `SHAPES` and `CONTRACTIONS` map the name of an operation to the function that computes it from an
`Operation` and its operands. Control flow and calls are in `autopar.frontend.stablehlo.interpret`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.stablehlo.reader import Operation, constant_of

Handler = Callable[..., Any]
_RNG = MappingProxyType({"DEFAULT": "default", "PHILOX": "philox", "THREE_FRY": "three_fry"})
#: Runs the region of an operation on values: (region, values) -> results.
RunRegion = Callable[[Any, Sequence[Any]], list[Any]]

_REDUCERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.add": lax.reduce_sum,
        "stablehlo.multiply": lax.reduce_prod,
        "stablehlo.maximum": lax.reduce_max,
        "stablehlo.minimum": lax.reduce_min,
        "stablehlo.and": lax.reduce_and,
        "stablehlo.or": lax.reduce_or,
        "stablehlo.xor": lax.reduce_xor,
    }
)
_BINARY: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.add": lax.add,
        "stablehlo.multiply": lax.mul,
        "stablehlo.maximum": lax.max,
        "stablehlo.minimum": lax.min,
        "stablehlo.and": lax.bitwise_and,
        "stablehlo.or": lax.bitwise_or,
        "stablehlo.xor": lax.bitwise_xor,
    }
)
_SCATTERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.add": lax.scatter_add,
        "stablehlo.multiply": lax.scatter_mul,
        "stablehlo.maximum": lax.scatter_max,
        "stablehlo.minimum": lax.scatter_min,
    }
)


def _plain(function: Callable[..., Any]) -> Handler:
    return lambda op, *values: function(*values)


def _round(method: Any) -> Handler:
    return lambda op, x: lax.round(x, method)


_COMPARE = MappingProxyType({"EQ": lax.eq, "NE": lax.ne, "GE": lax.ge, "GT": lax.gt, "LE": lax.le, "LT": lax.lt})


def _compare(op: Operation, a: Any, b: Any) -> Any:
    return _COMPARE[op.word("comparison_direction")](a, b)


def _convert(op: Operation, x: Any) -> Any:
    return lax.convert_element_type(x, op.dtypes[0])


def _bitcast(op: Operation, x: Any) -> Any:
    return lax.bitcast_convert_type(x, op.dtypes[0])


def _reduce_precision(op: Operation, x: Any) -> Any:
    return lax.reduce_precision(x, op.integer("exponent_bits"), op.integer("mantissa_bits"))


def _clamp(op: Operation, least: Any, x: Any, most: Any) -> Any:
    return lax.clamp(least, x, most)


def _barrier(op: Operation, *values: Any) -> Any:
    return list(lax.optimization_barrier(values))


def _square(op: Operation, x: Any) -> Any:
    return lax.mul(x, x)


def _imaginary_or_zero(op: Operation, x: Any) -> Any:
    return lax.imag(x) if jnp.iscomplexobj(x) else lax.full_like(x, 0)


ELEMENTWISE: Mapping[str, Handler] = MappingProxyType(
    {
        "stablehlo.abs": _plain(lax.abs),
        "stablehlo.add": _plain(lax.add),
        "stablehlo.and": _plain(lax.bitwise_and),
        "stablehlo.atan2": _plain(lax.atan2),
        "stablehlo.bitcast_convert": _bitcast,
        "stablehlo.cbrt": _plain(lax.cbrt),
        "stablehlo.ceil": _plain(lax.ceil),
        "stablehlo.clamp": _clamp,
        "stablehlo.compare": _compare,
        "stablehlo.complex": _plain(lax.complex),
        "stablehlo.convert": _convert,
        "stablehlo.cosine": _plain(lax.cos),
        "stablehlo.count_leading_zeros": _plain(lax.clz),
        "stablehlo.divide": _plain(lax.div),
        "stablehlo.exponential": _plain(lax.exp),
        "stablehlo.exponential_minus_one": _plain(lax.expm1),
        "stablehlo.floor": _plain(lax.floor),
        "stablehlo.imag": _imaginary_or_zero,
        "stablehlo.is_finite": _plain(lax.is_finite),
        "stablehlo.log": _plain(lax.log),
        "stablehlo.log_plus_one": _plain(lax.log1p),
        "stablehlo.logistic": _plain(lax.logistic),
        "stablehlo.maximum": _plain(lax.max),
        "stablehlo.minimum": _plain(lax.min),
        "stablehlo.multiply": _plain(lax.mul),
        "stablehlo.negate": _plain(lax.neg),
        "stablehlo.not": _plain(lax.bitwise_not),
        "stablehlo.optimization_barrier": _barrier,
        "stablehlo.or": _plain(lax.bitwise_or),
        "stablehlo.popcnt": _plain(lax.population_count),
        "stablehlo.power": _plain(lax.pow),
        "stablehlo.real": _plain(jnp.real),
        "stablehlo.reduce_precision": _reduce_precision,
        "stablehlo.remainder": _plain(lax.rem),
        "stablehlo.round_nearest_afz": _round(lax.RoundingMethod.AWAY_FROM_ZERO),
        "stablehlo.round_nearest_even": _round(lax.RoundingMethod.TO_NEAREST_EVEN),
        "stablehlo.rsqrt": _plain(lax.rsqrt),
        "stablehlo.select": _plain(lax.select),
        "stablehlo.shift_left": _plain(lax.shift_left),
        "stablehlo.shift_right_arithmetic": _plain(lax.shift_right_arithmetic),
        "stablehlo.shift_right_logical": _plain(lax.shift_right_logical),
        "stablehlo.sign": _plain(lax.sign),
        "stablehlo.sine": _plain(lax.sin),
        "stablehlo.sqrt": _plain(lax.sqrt),
        "stablehlo.subtract": _plain(lax.sub),
        "stablehlo.tan": _plain(lax.tan),
        "stablehlo.tanh": _plain(lax.tanh),
        "stablehlo.xor": _plain(lax.bitwise_xor),
        "chlo.acos": _plain(lax.acos),
        "chlo.acosh": _plain(lax.acosh),
        "chlo.asin": _plain(lax.asin),
        "chlo.asinh": _plain(lax.asinh),
        "chlo.atan": _plain(lax.atan),
        "chlo.atanh": _plain(lax.atanh),
        "chlo.bessel_i1e": _plain(lax.bessel_i1e),
        "chlo.cosh": _plain(lax.cosh),
        "chlo.digamma": _plain(lax.digamma),
        "chlo.erf": _plain(lax.erf),
        "chlo.erf_inv": _plain(lax.erf_inv),
        "chlo.erfc": _plain(lax.erfc),
        "chlo.lgamma": _plain(lax.lgamma),
        "chlo.next_after": _plain(lax.nextafter),
        "chlo.sinh": _plain(lax.sinh),
        "chlo.square": _square,
        "chlo.tan": _plain(lax.tan),
    }
)


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


def _end(dtype: Any, sign: int) -> Any:
    """The smallest (sign -1) or largest (1) value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(sign * np.inf, dtype)
    info = np.iinfo(dtype)
    return np.asarray(info.min if sign < 0 else info.max, dtype)


#: Neutral elements by which jax knows sums, products, maxima and minima of windows.
_NEUTRAL: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "stablehlo.add": lambda dtype: np.zeros((), dtype),
        "stablehlo.multiply": lambda dtype: np.ones((), dtype),
        "stablehlo.maximum": lambda dtype: _end(dtype, -1),
        "stablehlo.minimum": lambda dtype: _end(dtype, 1),
    }
)


def dot_general(op: Operation, run: RunRegion, a: Any, b: Any) -> Any:
    """Results of ``stablehlo.dot_general``."""
    n = op.numbers("dot_dimension_numbers", "DotDimensionNumbers")
    contracted = (tuple(n.lhs_contracting_dimensions), tuple(n.rhs_contracting_dimensions))
    batch = (tuple(n.lhs_batching_dimensions), tuple(n.rhs_batching_dimensions))
    return lax.dot_general(a, b, (contracted, batch), op.precision(), preferred_element_type=op.dtypes[0])


def dot(op: Operation, run: RunRegion, a: Any, b: Any) -> Any:
    """``stablehlo.dot``: the last dim with the first."""
    numbers = (((a.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(a, b, numbers, op.precision(), preferred_element_type=op.dtypes[0])


def convolution(op: Operation, run: RunRegion, x: Any, kernel: Any) -> Any:
    """Results of ``stablehlo.convolution``."""
    n = op.numbers("dimension_numbers", "ConvDimensionNumbers")
    spatial = len(n.input_spatial_dimensions)
    if any(op.bools("window_reversal", spatial)):
        kernel = lax.rev(
            kernel,
            [d for d, r in zip(n.kernel_spatial_dimensions, op.bools("window_reversal", spatial), strict=True) if r],
        )
    ones = [1] * spatial
    return lax.conv_general_dilated(
        x,
        kernel,
        op.ints("window_strides", ones),
        op.pairs("padding", spatial),
        op.ints("lhs_dilation", ones),
        op.ints("rhs_dilation", ones),
        lax.ConvDimensionNumbers(
            (n.input_batch_dimension, n.input_feature_dimension, *n.input_spatial_dimensions),
            (n.kernel_output_feature_dimension, n.kernel_input_feature_dimension, *n.kernel_spatial_dimensions),
            (n.output_batch_dimension, n.output_feature_dimension, *n.output_spatial_dimensions),
        ),
        op.integer("feature_group_count", 1),
        op.integer("batch_group_count", 1),
        op.precision(),
        op.dtypes[0],
    )


def only_operation(region: Any) -> str:
    """Name of the one operation that combines two elements in a region, in either order; "" for any other region."""
    block = region.blocks[0]
    body = list(block.operations)
    if len(body) != 2 or len(block.arguments) != 2:
        return ""
    combined, returned = body
    plain = set(combined.operands) == set(block.arguments) and list(returned.operands) == list(combined.results)
    return str(combined.operation.name) if plain else ""


def reduce(op: Operation, run: RunRegion, *values: Any) -> Any:
    """``stablehlo.reduce``: with one array and a plain operation jax's own reduction, which splits."""
    arrays, initial = values[: len(values) // 2], values[len(values) // 2 :]
    dims = tuple(op.ints("dimensions"))
    name = only_operation(op.op.regions[0])
    if len(arrays) == 1 and name in _REDUCERS:
        result = _REDUCERS[name](arrays[0], dims)
        return (
            result
            if _is_neutral(name, op.op.operands[1], arrays[0].dtype)
            else _BINARY[name](result, lax.broadcast(initial[0], result.shape))
        )

    def combine(a: Any, b: Any) -> Any:
        return tuple(run(op.op.regions[0], [*a, *b]))

    return list(lax.reduce(tuple(arrays), tuple(initial), combine, dims))


def _is_neutral(name: str, initial: Any, dtype: Any) -> bool:
    """Whether a reduction of ``dtype`` begins with the neutral element, as the text of its constant says."""
    if not hasattr(initial.owner, "name") or initial.owner.name != "stablehlo.constant":
        return False
    text = str(initial.owner.attributes["value"]).partition("<")[2].partition(">")[0]
    least = text in ("0xFF800000", "0xFF80", "0xFC00", "0xFFF0000000000000", "false")
    most = text in ("0x7F800000", "0x7F80", "0x7C00", "0x7FF0000000000000", "true")
    if jnp.issubdtype(dtype, jnp.integer):
        info: Any = jnp.iinfo
        least, most = text == str(info(dtype).min), text == str(info(dtype).max)
    zero = text.lstrip("-") in ("0.000000e+00", "0", "false", "(0.000000e+00,0.000000e+00)")
    return {
        "stablehlo.add": zero,
        "stablehlo.or": zero,
        "stablehlo.xor": zero,
        "stablehlo.multiply": text in ("1.000000e+00", "1", "true"),
        "stablehlo.and": text in ("true", "-1"),
        "stablehlo.maximum": least,
        "stablehlo.minimum": most,
    }[name]


def reduce_window(op: Operation, run: RunRegion, *values: Any) -> Any:
    """Results of ``stablehlo.reduce_window`` of one array."""
    if len(values) != 2:
        raise op.unknown("of several arrays")
    x, initial = values
    name = only_operation(op.op.regions[0])
    ones = [1] * x.ndim
    more = (
        op.ints("window_dimensions"),
        op.ints("window_strides", ones),
        op.pairs("padding", x.ndim),
        op.ints("base_dilations", ones),
        op.ints("window_dilations", ones),
    )
    if name not in _BINARY or not _is_neutral(name, op.op.operands[1], x.dtype):
        return lax.reduce_window(x, initial, lambda a, b: run(op.op.regions[0], [a, b])[0], *more)
    neutral = _NEUTRAL[name](x.dtype) if name in _NEUTRAL else initial
    return lax.reduce_window(x, neutral, _BINARY[name], *more)


def scatter(op: Operation, run: RunRegion, *values: Any) -> Any:
    """Results of ``stablehlo.scatter`` of one array."""
    if len(values) != 3:
        raise op.unknown("of several arrays")
    x, indices, updates = values
    n = op.numbers("scatter_dimension_numbers", "ScatterDimensionNumbers")
    if n.index_vector_dim == indices.ndim:
        indices = indices[..., None]
    elif n.index_vector_dim != indices.ndim - 1:
        raise op.unknown("with index vectors in another dim than the last")
    numbers = lax.ScatterDimensionNumbers(
        tuple(n.update_window_dims),
        tuple(n.inserted_window_dims),
        tuple(n.scattered_dims_to_operand_dims),
        tuple(n.input_batching_dims),
        tuple(n.scatter_indices_batching_dims),
    )
    block = op.op.regions[0].blocks[0]
    body = list(block.operations)
    name = only_operation(op.op.regions[0])
    replaces = len(body) == 1 and list(body[0].operands) == [block.arguments[1]]
    if not replaces and name not in _SCATTERS:
        raise op.unknown("with a region that is neither a sum, product, maximum, minimum nor the update")
    function = lax.scatter if replaces else _SCATTERS[name]
    return function(
        x,
        indices,
        updates,
        numbers,
        indices_are_sorted=op.flag("indices_are_sorted"),
        unique_indices=op.flag("unique_indices"),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def sort(op: Operation, run: RunRegion, *values: Any) -> Any:
    """``stablehlo.sort`` by the first arrays in ascending order, or by the first one in descending order."""
    keys, descending = _sorted_keys(op.op.regions[0])
    if keys == 0:
        raise op.unknown("with an order that is neither ascending nor descending")
    given = (_turned(values[0]), *values[1:]) if descending else values
    result = lax.sort(given, dimension=op.integer("dimension", -1), is_stable=op.flag("is_stable"), num_keys=keys)
    return [_turned(result[0]), *result[1:]] if descending else list(result)


def _turned(x: Any) -> Any:
    """Values in the opposite order."""
    return lax.neg(x) if jnp.issubdtype(x.dtype, jnp.floating) else lax.bitwise_not(x)


def _sorted_keys(region: Any) -> tuple[int, bool]:
    """Number of arrays whose elements a comparison looks at, and whether the largest is first; 0 for other orders."""
    directions = [
        str(o.attributes["comparison_direction"]).rstrip(">").split()[-1]
        for o in region.blocks[0].operations
        if o.operation.name == "stablehlo.compare"
    ]
    less, greater = directions.count("LT"), directions.count("GT")
    if not set(directions) <= {"LT", "GT", "EQ", "NE"} or (less and greater) or greater > 1:
        return 0, False
    return max(less, greater), greater == 1


CONTRACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "stablehlo.convolution": convolution,
        "stablehlo.dot": dot,
        "stablehlo.dot_general": dot_general,
        "stablehlo.reduce": reduce,
        "stablehlo.reduce_window": reduce_window,
        "stablehlo.scatter": scatter,
        "stablehlo.sort": sort,
    }
)
