"""Placements that the user's code asks for: ``with_sharding_constraint``, an inner ``jit(out_shardings)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.ir import Attr

_SHARDING = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
_FREE = -1


def placed_attrs(primitive: str, params: Mapping[str, Any], rank: int) -> tuple[tuple[str, Attr], ...]:
    """The attribute ``shards`` of an equation that says where its result lies; nothing for any other.

    Args:
        primitive: of the equation.
        params: its parameters.
        rank: number of dims of its result.
    """
    axes = shards(params.get(_SHARDING.get(primitive, "")), rank)
    return () if not axes else (("shards", axes),)


def shards(sharding: Any, rank: int) -> tuple[int, ...] | None:
    """Number of shards of each dim, -1 where any number will do; None where ``sharding`` names no mesh axes."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    sizes = {str(a): int(n) for a, n in sharding.mesh.shape.items()}
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    counts = []
    for entry in entries:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        counts.append(_FREE if entry is PartitionSpec.UNCONSTRAINED else math.prod(sizes[str(a)] for a in axes))
    return tuple(counts)


def result_shardings(eqn: JaxprEqn) -> list[Any]:
    """Sharding that the user gave each result of an inner ``jax.jit``, or None."""
    given = eqn.params.get("out_shardings", ()) if eqn.primitive.name in ("jit", "pjit") else ()
    return [s if isinstance(s, NamedSharding) and _is_auto(s.mesh) else None for s in given]


def _is_auto(mesh: Any) -> bool:
    return not mesh.empty and all(t == AxisType.Auto for t in mesh.axis_types)
