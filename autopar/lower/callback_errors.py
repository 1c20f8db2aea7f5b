"""Exceptions of Python code that a program calls, kept until the step is over.

An exception that left a callback would end its device's program, and the others would wait for it in their next
collective until XLA ends the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive

#: Bytes that memory is aligned to which jax takes over without a copy.
_ALIGNMENT = 64


@dataclass(eq=False)
class CallbackErrors:
    """Exceptions of one program's callbacks since the last question.

    Args:
        by_buffers: whether callbacks read their operands where they lie. jax copies them on threads of its own, of
            which CPUs have one a core: with as many devices, all of them wait for the one that called.
        raised: the exceptions, the first first.
        guards: whether the program has callbacks whose exceptions are kept.
    """

    by_buffers: bool = False
    raised: list[BaseException] = field(default_factory=list)
    guards: bool = False

    def call(self, primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
        """Results of a callback's primitive, whose exceptions are kept."""
        avals = params.get("result_avals", ())
        callback: Callable[..., Any] | None = params.get("callback")
        if self.by_buffers and all(_is_plain(a.dtype) for a in (*operands, *avals)):
            # Bound to arrays, a print prints.
            guard = self._guarded(callback or partial(primitive.bind, **params), avals)

            def by_buffers(context: Any, outputs: Any, *buffers: Any) -> None:
                del context
                for output, result in zip(outputs, guard(*map(_owned, map(np.asarray, buffers))), strict=True):
                    np.asarray(output)[...] = result

            impure = primitive.name != "pure_callback"
            shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
            return list(buffer_callback(by_buffers, shapes, has_side_effect=impure)(*operands))
        guarded = params if callback is None else {**params, "callback": self._guarded(callback, avals)}
        return list(primitive.bind(*operands, **guarded))

    def _guarded(self, callback: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., list[Any]]:
        """A callback that returns zeros in place of an exception.

        Args:
            callback: the callback.
            avals: shapes and dtypes of its results.
        """
        self.guards = True

        def guard(*arrays: Any) -> list[Any]:
            try:
                with jax.default_device(_cpu()):
                    return _checked(callback(*arrays), avals) if avals else _nothing(callback(*arrays))
            except BaseException as error:
                self.raised.append(error)
                return [np.zeros(a.shape, a.dtype) for a in avals]

        return guard

    def check(self, results: Any) -> None:
        """Waits for a step and raises what a callback has raised, as jax does: JaxRuntimeError with its text.

        Args:
            results: of the step.
        """
        jax.block_until_ready(results)
        jax.effects_barrier()
        if self.raised:
            first = self.raised[0]
            self.raised.clear()
            text = "".join(traceback.format_exception(first))
            raise jax.errors.JaxRuntimeError(f"INTERNAL: a callback raised {type(first).__name__}: {text}") from first


def _nothing(result: Any) -> list[Any]:
    """No results, whatever a callback without any returned."""
    del result
    return []


def _checked(results: Sequence[Any], avals: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Results of a callback as numpy. RuntimeError, as jax words it, where they are not what was announced."""
    if len(results) != len(avals):
        raise RuntimeError(
            f"Mismatched number of outputs from callback. Expected: {len(avals)}, Actual: {len(results)}"
        )
    arrays = [np.asarray(r) for r in results]
    arrays = [a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays]
    for n, (array, aval) in enumerate(zip(arrays, avals, strict=True)):
        for what, got, wanted in (("shape", array.shape, aval.shape), ("dtype", array.dtype, aval.dtype)):
            if got != wanted:
                raise RuntimeError(f"Incorrect output {what} for return value #{n}: Expected: {wanted}, Actual: {got}")
    return arrays


def _owned(view: np.ndarray[Any, Any]) -> jax.Array:
    """An array of the values of a view, which is there at once: jax takes over memory that is aligned."""
    memory = np.empty(view.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
    copy[...] = view
    array: jax.Array = jax.device_put(copy, _cpu())
    return array


def _is_plain(dtype: Any) -> bool:
    """Whether numpy knows a dtype, whose numbers have whole bytes."""
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc"


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]
