"""Checks of single values of a cluster, for those that are built in code; each names the field it is about."""

from __future__ import annotations

import math
from typing import Any

from autopar.errors import ClusterError


def _impossible(field: str, value: Any, wanted: str) -> ClusterError:
    return ClusterError(f"{field} is {value!r}, which is impossible", remedy=f"give {wanted}")


def positive(field: str, value: Any, *, zero: bool = False) -> float:
    """``value`` as a float if it is a finite number above 0 (or 0 where ``zero``), else ClusterError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _impossible(field, value, "a number")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise _impossible(field, value, "a finite number, 0 or more" if zero else "a finite number above 0")
    return float(value)


def fraction(field: str, value: Any) -> float:
    """``value`` as a float if it is a number in (0, 1], else ClusterError."""
    if positive(field, value) > 1:
        raise _impossible(field, value, "a number above 0 and at most 1")
    return float(value)


def whole(field: str, value: Any) -> int:
    """``value`` as an int if it is a whole number above 0 (``80e9`` counts as one), else ClusterError."""
    if positive(field, value) != int(value):
        raise _impossible(field, value, "a whole number above 0")
    return int(value)


def text(field: str, value: Any) -> str:
    """``value`` if it is a text that is not empty, else ClusterError."""
    if not isinstance(value, str) or not value:
        raise _impossible(field, value, "a text that is not empty")
    return value
