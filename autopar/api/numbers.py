"""Differences of two arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Difference:
    """Norms of the difference of two arrays and of the second one, and the largest difference of an element.

    All are inf where one array is finite and the other is not, or where exact values are unequal.
    """

    norm: float
    of: float
    absolute: float

    @property
    def relative(self) -> float:
        """Norm of the difference over norm of the array; the norm itself where the array is zero."""
        return self.norm / self.of if self.of else self.norm


def host(array: Any) -> np.ndarray[Any, Any]:
    """The array in numpy; keys as the numbers that they are."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def difference(got: Any, want: Any) -> Difference:
    """Difference of ``got`` and ``want``; equal infinities and nans are none."""
    a, b = host(got), host(want)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(math.inf, 0.0, math.inf)
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        same = np.array_equal(a, b)
        return Difference(0.0, 0.0, 0.0) if same else Difference(math.inf, 0.0, math.inf)
    wide = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference(math.inf, 0.0, math.inf)
    distances = a[finite] - b[finite]
    return Difference(
        float(np.linalg.norm(distances)), float(np.linalg.norm(b[finite])), float(np.abs(distances).max(initial=0.0))
    )


def tolerance_of(dtype: Any) -> float:
    """Relative difference that another order of summing may make: a power of the dtype's rounding; 0 if exact."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    info: Any = jnp.finfo
    return float(info(dtype).eps) * 100
