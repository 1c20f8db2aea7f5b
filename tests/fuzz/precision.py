"""The types that programs compute in, and what of a difference rounding explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Precision:
    """A type of floats.

    Args:
        rtol: largest norm of a difference that needs no explanation, relative to the norm of the leaf.
        atol: largest norm of a difference that is rounding noise of values near one.
        noise: relative size of the noise that tells what rounding can do: a few units in the last place.
    """

    rtol: float
    atol: float
    noise: float


_DOUBLE = Precision(1e-9, 1e-11, 1e-13)
_SINGLE = Precision(1e-5, 1e-6, 3e-7)

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float64": _DOUBLE,
        "complex128": _DOUBLE,
        "float32": _SINGLE,
        "complex64": _SINGLE,
        "float16": Precision(1e-2, 3e-3, 1e-3),
        "bfloat16": Precision(3e-2, 1e-2, 8e-3),
    }
)


def precision_of(dtype: Any) -> Precision:
    """The precision of an array's type."""
    return PRECISIONS[str(dtype)]


def noise_of(dtype: Any, program: str) -> float:
    """Size of the noise on a value: none on types that the program uses in passing, and less precise than its own."""
    mine, own = precision_of(dtype), PRECISIONS[program]
    return mine.noise if mine.noise <= own.noise else 0.0


def coarser(dtype: Any, program: str) -> Precision:
    """The precision of a leaf: its own or the program's, whichever is worse."""
    return max(precision_of(dtype), PRECISIONS[program], key=lambda p: p.rtol)
