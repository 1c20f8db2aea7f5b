"""Parameters of a jax equation as plain `Attr` data, for the planner that does not know jax.

`attrs_of` keeps what has a plain form. `placed_attrs` and `result_shardings` read where the user's code asks a result
to lie: ``with_sharding_constraint``, ``reshard``, an inner ``jit(out_shardings)``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar._compat.dtypes import dtype_name
from autopar.ir import Attr

# Parameters that say nothing about what is computed.
_IGNORED = frozenset({"sharding", "out_sharding", "accuracy", "ctx_mesh", "debug_info", "unroll"})
_SHARDING = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
_FREE = -1


class _NotPlainError(Exception):
    """The value has no plain form (a jaxpr, a function)."""


def _plain(value: Any) -> Attr:
    if isinstance(value, enum.Enum):  # before int and str: some enums are those too
        return value.name
    if isinstance(value, np.bool_ | np.number | np.str_):  # before float: numpy's float64 is one
        return _plain(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.lax.DotAlgorithm):
        return _algorithm_name(value)
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return dtype_name(np.dtype(value))
    if isinstance(value, ClosedJaxpr | Jaxpr) or callable(value):
        raise _NotPlainError
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.size == 1:
        return _plain(np.asarray(value).item())
    text = str(value)
    if " at 0x" in text:  # an address: it would differ from run to run
        raise _NotPlainError
    return text


def _algorithm_name(algorithm: jax.lax.DotAlgorithm) -> str:
    """The name of an algorithm of products, as of a `jax.lax.DotAlgorithmPreset`: ``BF16_BF16_F32_X3``."""
    types = algorithm.lhs_precision_type, algorithm.rhs_precision_type, algorithm.accumulation_type
    passes = algorithm.num_primitive_operations
    return "_".join(dtype_name(np.dtype(t)).upper() for t in types) + (f"_X{passes}" if passes > 1 else "")


def _fields(value: Any) -> Mapping[str, Any] | None:
    """Fields of a named tuple or a dataclass of parameters (dimension numbers)."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def attrs_of(params: Mapping[str, Any]) -> tuple[tuple[str, Attr], ...]:
    """Plain parameters of an equation, sorted by name.

    Named tuples and dataclasses called ``dimension_numbers`` are spread into their fields; jaxprs and callables are
    left out; enums become their names, dtypes their short names.
    """
    attrs: dict[str, Attr] = {}
    for name, value in params.items():
        if name in _IGNORED:
            continue
        fields = _fields(value) if name == "dimension_numbers" else None
        for key, part in (fields or {name: value}).items():
            try:
                attrs[key] = _plain(part)
            except _NotPlainError:
                continue
    return tuple(sorted(attrs.items()))


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
