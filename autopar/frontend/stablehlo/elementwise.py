"""StableHLO operations on elements, as jax's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend.stablehlo.reader import Operation

Handler = Callable[..., Any]


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
