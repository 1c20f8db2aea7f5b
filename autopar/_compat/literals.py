"""numpy arrays among the constants of a jaxpr, which newer jax wraps."""

from __future__ import annotations

from typing import Any

import numpy as np

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
