"""Sums of terms of a reduction over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Layout, Operator, TensorType
from autopar.ir.formats import WireFormat
from autopar.ir.primitives import CASTS, RESHAPES, wire_of
from autopar.precision.wire import wired

_HALVES = ("bf16", "f16")
_VIEWS = CASTS | RESHAPES | {"neg", "transpose"}


def accumulator_dtype(type: TensorType) -> Any:
    """Dtype in which terms add up: sums of halves in float32, as one long sum inside a matrix product would."""
    return np.dtype("float32") if type.dtype in _HALVES else numpy_dtype(type.dtype)


def neutral(type: TensorType, reduce: str) -> Any:
    """An accumulator before the first term: a whole array of ``type``'s shape."""
    dtype = accumulator_dtype(type)
    if reduce == "sum":
        return jnp.zeros(type.shape, dtype)
    if reduce in ("and", "or"):
        return jnp.full(type.shape, reduce == "and", dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        least = -jnp.inf
    elif dtype == np.dtype(bool):
        return jnp.full(type.shape, reduce == "min", dtype)
    else:
        info: Any = jnp.iinfo
        return jnp.full(type.shape, info(dtype).min if reduce == "max" else info(dtype).max, dtype)
    return jnp.full(type.shape, least if reduce == "max" else -least, dtype)


def formats_of_sums(operators: Sequence[Operator]) -> dict[str, str]:
    """Format in which ``operators``, which run after a loop, take each value sent: see `parallelize(wire=...)`.

    Casts, reshapes and signs between the value and the mark change nothing of it.
    """
    formats: dict[str, str] = {}
    for op in reversed(operators):
        if op.primitive == "wire":
            formats[str(op.operands[0])] = wire_of(op)
        elif op.primitive in _VIEWS and op.results[0].name in formats and op.reads:
            formats.setdefault(op.reads[0], formats[op.results[0].name])
    return formats


def add_term(total: Any, term: Any, layout: Layout, format: str = "") -> Any:
    """``total`` with one more ``term``, which devices send in ``format`` where they have parts of the total."""
    term = sent_in(lax.convert_element_type(term, total.dtype), format)
    return {
        "sum": lax.add,
        "max": lax.max,
        "min": lax.min,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
    }[layout.reduce](total, term)


def sent_in(term: Any, format: str) -> Any:
    """``term``, which devices send in ``format`` where that is not empty."""
    return wired(term, WireFormat.parse(format)) if format else term
