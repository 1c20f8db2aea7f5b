"""Parameters of a jax equation as plain `Attr` data, for the planner that does not know jax."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from autopar._compat.dtypes import dtype_name
from autopar.ir import Attr

# Parameters that say nothing about what is computed.
_IGNORED = frozenset({"sharding", "out_sharding", "accuracy", "ctx_mesh", "debug_info", "unroll"})


class _NotPlainError(Exception):
    """The value has no plain form (a jaxpr, a function)."""


def _plain(value: Any) -> Attr:
    if isinstance(value, enum.Enum):  # before int and str: some enums are those too
        return value.name
    if isinstance(value, np.bool_ | np.number | np.str_):  # before float: numpy's float64 is one
        return _plain(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
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
