"""Calls of Python by a program, whose exceptions are kept until the step is over.

The localizer of callbacks asks `Callbacks`. An exception that left a callback would end its device's program, and the
others would wait for it in their next collective until XLA ends the process. Nothing here orders calls.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive

from autopar._compat.dtypes import SUB_BYTE, bytes_of, from_bytes, whole_bytes
from autopar._compat.xla import with_value

#: Bytes that memory is aligned to which jax takes over without a copy.
_ALIGNMENT = 64


@dataclass(eq=False)
class Callbacks:
    """Callbacks of one program, and their exceptions since the last question.

    Args:
        by_buffers: whether callbacks read their operands in place. jax copies them on threads of its own, of which CPUs
            have one a core: with as many devices, all of them wait for the one that called.
        keeps: whether exceptions are kept for `check`; else they leave the callback.
        raised: the exceptions, the first first.
        guards: whether the program has callbacks whose exceptions are kept.
    """

    by_buffers: bool = False
    keeps: bool = False
    raised: list[BaseException] = field(default_factory=list)
    guards: bool = False

    def call(self, primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any], calls: Calls) -> list[Any]:
        """Results of a callback's primitive.

        Args:
            primitive: pure, impure, or of debugging.
            params: its parameters.
            operands: whole.
            calls: told when the call has ended.
        """
        avals = params.get("result_avals", ())
        callback: Callable[..., Any] | None = params.get("callback")
        if not self._in_place(operands, avals):
            guarded = params if callback is None else {**params, "callback": self._guarded(callback, avals)}
            return list(primitive.bind(*operands, **guarded))
        # Bound to arrays, a print prints.
        guard = self._guarded(callback or partial(primitive.bind, **params), avals)
        # Contexts are those of a thread, and the call is made in another one.
        wide = bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)

        def call(outputs: Sequence[Any], *buffers: Any) -> None:
            try:
                with jax.enable_x64(wide):
                    results = guard(*(_owned(_numpy(b, o)) for b, o in zip(buffers, operands, strict=True)))
                for output, result in zip(outputs, results, strict=True):
                    output[...] = result if _is_plain(result.dtype) else _numpy_bytes(result)
            finally:
                calls.end()

        arrays = [o if _is_plain(o.dtype) else bytes_of(o) for o in operands]
        outputs = _by_buffers(call, avals, arrays, _is_impure(primitive))
        return [o if _is_plain(a.dtype) else from_bytes(o, a) for o, a in zip(outputs, avals, strict=True)]

    def wait(
        self, primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any], index: Any, calls: Calls
    ) -> list[Any]:
        """Zeros, once the device that calls has called: XLA ends the process where a collective waits for 40 seconds.

        Args:
            primitive: of the callback.
            params: its parameters.
            operands: whole.
            index: number of this device.
            calls: of the device that calls.
        """
        avals = params.get("result_avals", ())
        zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
        if not self._in_place(operands, avals) or jax.process_count() > 1:
            return zeros

        def wait(outputs: Sequence[Any], index: Any) -> None:
            calls.wait(int(index))
            outputs[0][...] = 0

        result = jax.ShapeDtypeStruct((), jnp.int32)
        (zero,) = _by_buffers(wait, [result], [index], _is_impure(primitive))
        return [z + zero.astype(z.dtype) for z in zeros]

    def _in_place(self, operands: Sequence[Any], avals: Sequence[Any]) -> bool:
        """Whether a callback reads its operands in place; jax takes keys alone as what they are made of."""
        return self.by_buffers and not any(_is_key(a) for a in (*operands, *avals))

    def _guarded(self, callback: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., list[Any]]:
        """A callback that returns zeros in place of an exception.

        Args:
            callback: the callback.
            avals: shapes and dtypes of its results.
        """
        self.guards = self.guards or self.keeps

        def guard(*arrays: Any) -> list[Any]:
            try:
                with jax.default_device(_cpu()):
                    return _checked(callback(*arrays), avals) if avals else _nothing(callback(*arrays))
            except BaseException as error:
                if not self.keeps:
                    raise
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


@dataclass(eq=False)
class Calls:
    """Calls of one operator, which the first device makes and the others wait for.

    Args:
        ended: how many calls have ended.
        awaited: how many each other device has waited for.
        changed: holds both.
    """

    ended: int = 0
    awaited: Counter[int] = field(default_factory=Counter)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def end(self) -> None:
        """Notes that a call has ended."""
        with self.changed:
            self.ended += 1
            self.changed.notify_all()

    def wait(self, device: int) -> None:
        """Returns when as many calls have ended as ``device`` has waited for, with this one."""
        with self.changed:
            self.awaited[device] += 1
            number = self.awaited[device]
            self.changed.wait_for(lambda: self.ended >= number)


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


def _by_buffers(
    function: Callable[..., None], avals: Sequence[Any], operands: Sequence[Any], impure: bool
) -> list[Any]:
    """Results of a Python function that jax calls with the memory of results and operands.

    Args:
        function: of a list of numpy views of the results, which it fills, and of one view for each operand.
        avals: shapes and dtypes of the results; those that numpy does not know are bytes.
        operands: arrays of dtypes that numpy knows.
        impure: whether the calls are effects.
    """
    shapes = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype)
        if _is_plain(a.dtype)
        else jax.ShapeDtypeStruct((math.prod(a.shape) * whole_bytes(a.dtype).itemsize,), jnp.uint8)
        for a in avals
    )

    def call(context: Any, outputs: Sequence[Any], *buffers: Any) -> None:
        del context
        function([np.asarray(o) for o in outputs], *map(np.asarray, buffers))

    return list(buffer_callback(call, shapes, has_side_effect=impure)(*operands))


def _numpy(view: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
    """The array of the shape and dtype of ``like`` that a view of its memory, or of its bytes, stands for."""
    if _is_plain(like.dtype):
        return view
    array: np.ndarray[Any, Any] = view.view(whole_bytes(like.dtype)).astype(like.dtype).reshape(like.shape)
    return array


def _owned(view: np.ndarray[Any, Any]) -> jax.Array:
    """An array of the values of a view, which is there at once: jax takes over memory that is aligned."""
    memory = np.empty(view.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
    copy[...] = view
    array: jax.Array = jax.device_put(copy, _cpu())
    # Elements that share a byte would be unpacked on jax's threads.
    return with_value(array, copy) if view.dtype.name in SUB_BYTE else array


def _numpy_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array, flat, as `autopar._compat.dtypes.bytes_of` makes them in a program."""
    return array.astype(whole_bytes(array.dtype)).reshape(-1).view(np.uint8)


def _is_plain(dtype: Any) -> bool:
    """Whether numpy knows a dtype, whose numbers have whole bytes."""
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc"


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _is_impure(primitive: Primitive) -> bool:
    return bool(primitive.name != "pure_callback")


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]
