"""Localizers of callbacks into Python: one device calls, and all get the answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.dtypes import bytes_of, from_bytes
from autopar.ir.primitives import CALLBACKS
from autopar.lower.callbacks import Calls
from autopar.lower.localize.base import LocalContext, Localizer, axis_names, run_unchanged
from autopar.microbatch import AXIS


def call_once(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Results of a call that the first device makes; operands and results are whole.

    A loop over microbatches makes a call in each.
    """
    if AXIS in context.sizes:
        return run_unchanged(primitive, params, operands, context)
    axes, arrays, calls = tuple(context.sizes), [jnp.asarray(x) for x in operands], Calls()

    def call(*given: Any) -> list[Any]:
        return context.callbacks.call(primitive, params, given, calls)

    if not axes:
        return call(*arrays)
    index = context.index(axes)

    def wait(*_: Any) -> list[Any]:
        return context.callbacks.wait(primitive, params, index, calls)

    outputs = lax.cond(index == 0, call, wait, *arrays)
    return [_from_first(x, axis_names(context.index, axes)) for x in outputs]


def _from_first(array: Any, axes: tuple[str, ...]) -> Any:
    """The array of the first device; the others hold zeros. Bytes are added up: -0.0 + 0.0 is 0.0."""
    return from_bytes(lax.psum(bytes_of(array), axes), array) if array.size else array


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({name: call_once for name in sorted(CALLBACKS)})
