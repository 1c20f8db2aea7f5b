"""Makers of statements by name. Each takes a `Draw`, adds what it needs, raises `Rejected` if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.fuzz.draw import Draw
from tests.fuzz.operators import (
    closures,
    elementwise,
    indexing,
    models,
    products,
    randomness,
    reductions,
    shapes,
    structure,
)

Maker = Callable[[Draw], object]

OPERATORS: Mapping[str, tuple[float, Maker]] = MappingProxyType(
    {
        **elementwise.MAKERS,
        **shapes.MAKERS,
        **products.MAKERS,
        **reductions.MAKERS,
        **indexing.MAKERS,
        **randomness.MAKERS,
        **structure.MAKERS,
        **closures.MAKERS,
        **models.MAKERS,
    }
)
