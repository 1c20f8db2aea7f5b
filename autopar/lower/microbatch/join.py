"""How terms of a reduction add up over microbatches."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Layout, TensorType

_HALVES = ("bf16", "f16")


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


def add_term(total: Any, term: Any, layout: Layout) -> Any:
    """``total`` with one more ``term``."""
    term = lax.convert_element_type(term, total.dtype)
    return {
        "sum": lax.add,
        "max": lax.max,
        "min": lax.min,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
    }[layout.reduce](total, term)
