"""Constants of programs: numpy arrays among those of a jaxpr, which newer jax wraps, and numbers from their text."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar._compat.dtypes import numpy_dtype

try:
    from jax._src.literals import TypedNdArray

    _NUMPY: Any = (np.ndarray, TypedNdArray)
except ImportError:
    _NUMPY = np.ndarray


def own_constant(value: Any) -> Any:
    """A constant of a jaxpr in a buffer of its own: the caller may fill his numpy array again, programs do not change.

    Args:
        value: of any type; what is no numpy array comes back as it is.
    """
    return np.array(value, value.dtype) if isinstance(value, _NUMPY) else value


def scalar_of(text: str, dtype: str) -> Any:
    """The numpy scalar of a number's text and the short name of its dtype."""
    return np.asarray(complex(text) if dtype.startswith("c") else _number(text), numpy_dtype(dtype))


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        return float(text)
