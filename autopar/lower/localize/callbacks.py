"""Localizers of callbacks into Python: one device calls, and all get the answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.dtypes import numpy_dtype
from autopar.ir.primitives import CALLBACKS
from autopar.lower.callbacks import Calls
from autopar.lower.localize.base import DeviceAxes, LocalContext, Localizer, as_bytes, axis_names


def call_once(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Results of a call that the first device makes; operands and results are whole."""
    axes, arrays, calls = tuple(context.sizes), [jnp.asarray(x) for x in operands], Calls()

    def call(*given: Any) -> list[Any]:
        return context.callbacks.call(primitive, params, given, calls)

    if not axes:
        return call(*arrays)
    index = context.index(axes)
    # Of several groups that run one program a device knows its number in its own group alone.
    alone = not isinstance(context.index, DeviceAxes)

    def wait(*given: Any) -> list[Any]:
        if alone:
            return context.callbacks.wait(primitive, params, given, index, calls)
        return [jnp.zeros(t.shape, numpy_dtype(t.dtype)) for t in context.result_types]

    outputs = lax.cond(index == 0, call, wait, *arrays)
    return [_from_first(x, axis_names(context.index, axes)) for x in outputs]


def _from_first(array: Any, axes: tuple[str, ...]) -> Any:
    # The others hold zeros. As numbers: sums of bool are not everywhere.
    if array.size == 0:
        return array
    numbers = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
    return as_bytes(lambda a: lax.psum(a, axes), numbers).astype(array.dtype)


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({name: call_once for name in sorted(CALLBACKS)})
