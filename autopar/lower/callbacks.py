"""Calls of Python by a program, whose exceptions are kept until the step is over.

The localizer of callbacks asks `Callbacks`. An exception that left a callback would end its device's program, and the
others would wait for it in their next collective until XLA ends the process. Nothing here orders calls.

jax's CPU client has as many threads as the machine has cores, or as it has devices if these are more. Devices that
wait for a call hold theirs. A call that needs another one, as for the copy of a numpy array, waits for ever where the
devices hold all: `StuckCall` tells this from a call that takes long.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from autopar.errors import ClusterError

#: Bytes that memory is aligned to which jax takes over without a copy.
_ALIGNMENT = 64
#: Bytes of a numpy array that jax copies on a thread of its own.
_COPIED_BYTES = 1 << 18
#: So often a waiting device looks whether the call is stuck, at most.
_POLL_S = 1.0
#: Seconds that a step has to end when a call of it was found to be stuck.
_END_S = 5.0


@dataclass(eq=False)
class Callbacks:
    """Callbacks of one program, and their exceptions since the last question.

    Args:
        by_buffers: whether callbacks read their operands in place. jax copies them on threads of its own, of which CPUs
            have one a core: with as many devices, all of them wait for the one that called.
        guards: whether exceptions are kept for `check`; else they leave the callback. True of a program with callbacks
            in its graph, or in that of another stage, so that all processes know.
        raised: the exceptions, the first first.
        limit_s: seconds without progress after which a call that waits for its own step is given up; the runtime sets
            it.
        stuck: the error of such a call, until it is raised.
        changed: holds ``stuck`` and the end of a step that `check` waits for.
    """

    by_buffers: bool = False
    guards: bool = False
    raised: list[BaseException] = field(default_factory=list)
    limit_s: float = math.inf
    stuck: ClusterError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

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
        if not self.by_buffers:
            guarded = params if callback is None else {**params, "callback": self._guarded(callback, avals)}
            return list(primitive.bind(*operands, **guarded))
        # Bound to arrays, a print prints.
        guard = self._guarded(callback or partial(primitive.bind, **params), avals)
        # Contexts are those of a thread, and the call is made in another one.
        wide = bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
        # jax gives keys as what they are made of.
        given = [jax.random.key_data(o) if _is_key(o) else o for o in operands]

        def call(outputs: Sequence[Any], *buffers: Any) -> None:
            calls.begin()
            try:
                with jax.enable_x64(wide), jax.default_device(_cpu()):
                    results = guard(*(_owned(_numpy(b, o)) for b, o in zip(buffers, given, strict=True)))
                for output, result in zip(outputs, results, strict=True):
                    output[...] = result if _is_plain(result.dtype) else _numpy_bytes(result)
            finally:
                calls.end()
            self.give_up()

        arrays = [o if _is_plain(o.dtype) else bytes_of(o) for o in given]
        outputs = _by_buffers(call, avals, arrays, _is_impure(primitive))
        return [o if _is_plain(a.dtype) else from_bytes(o, a) for o, a in zip(outputs, avals, strict=True)]

    def wait(self, primitive: Primitive, params: Mapping[str, Any], index: Any, calls: Calls) -> list[Any]:
        """Zeros, once the device that calls has called: XLA ends the process where a collective waits for 40 seconds.

        Processes wait for each other in collectives, which take longer.

        Args:
            primitive: of the callback.
            params: its parameters.
            index: number of this device.
            calls: of the device that calls.
        """
        zeros = [jnp.zeros(a.shape, a.dtype) for a in params.get("result_avals", ())]
        if not self.by_buffers or jax.process_count() > 1:
            return zeros

        def wait(outputs: Sequence[Any], index: Any) -> None:
            calls.wait(int(index), self)
            outputs[0][...] = 0

        result = jax.ShapeDtypeStruct((), jnp.int32)
        (zero,) = _by_buffers(wait, [result], [index], _is_impure(primitive))
        return [z + zero.astype(z.dtype) for z in zeros]

    def _guarded(self, callback: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., list[Any]]:
        """A callback that returns zeros in place of an exception.

        Args:
            callback: the callback.
            avals: shapes and dtypes of its results.
        """

        def guard(*arrays: Any) -> list[Any]:
            try:
                return _checked(callback(*arrays), avals) if avals else _nothing(callback(*arrays))
            except BaseException as error:
                if not self.guards:
                    raise
                self.raised.append(error)
                return [np.zeros(a.shape, a.dtype) for a in avals]

        return guard

    def note_stuck(self, call: StuckCall) -> None:
        """Notes the error of a call that is stuck.

        Args:
            call: the call under way.
        """
        if self.stuck is None:
            error = call.error(self.limit_s)
            with self.changed:
                self.stuck = error
                self.changed.notify_all()

    def give_up(self) -> None:
        """Raises the error of a call that is stuck, on a device: all of the step's devices end with it."""
        if self.stuck is not None:
            raise self.stuck

    def check(self, results: Any) -> None:
        """Waits for a step with callbacks and raises what one of this process has raised, as jax does.

        Args:
            results: of the step.

        Raises:
            JaxRuntimeError: a callback raised; it has the text, and the exception as its cause.
            ClusterError: a callback waited for threads that its own step holds.
        """
        if not self.guards:
            return
        over = threading.Event()

        def wait() -> None:
            with suppress(Exception):  # raised below
                jax.block_until_ready(results)
            with self.changed:
                over.set()
                self.changed.notify_all()

        # A step whose call is stuck may never end.
        threading.Thread(target=wait, name="end of a step", daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: over.is_set() or self.stuck is not None)
            self.changed.wait_for(over.is_set, _END_S)
        self.raise_stuck()
        jax.block_until_ready(results)
        jax.effects_barrier()
        if self.raised:
            first = self.raised[0]
            self.raised.clear()
            text = "".join(traceback.format_exception(first))
            raise jax.errors.JaxRuntimeError(f"INTERNAL: a callback raised {type(first).__name__}: {text}") from first

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises the error of a call that was given up in place of the error that jax makes of it."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self.raise_stuck()
            raise

    def raise_stuck(self) -> None:
        """Raises the error of a call that was given up, once."""
        error, self.stuck = self.stuck, None
        if error is not None:
            raise error


@dataclass(eq=False)
class Calls:
    """Calls of one operator, which the first device makes and the others wait for.

    Args:
        ended: how many calls have ended.
        awaited: how many each other device has waited for.
        thread: that makes the call under way, 0 where there is none.
        changed: holds all of them.
    """

    ended: int = 0
    awaited: Counter[int] = field(default_factory=Counter)
    thread: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self) -> None:
        """Notes that a call begins, on this thread."""
        self.thread = threading.get_ident()

    def end(self) -> None:
        """Notes that a call has ended."""
        with self.changed:
            self.ended += 1
            self.thread = 0
            self.changed.notify_all()

    def wait(self, device: int, callbacks: Callbacks) -> None:
        """Returns when as many calls have ended as ``device`` has waited for, with this one.

        Args:
            device: number of the device.
            callbacks: asked whether the call is stuck. ClusterError where it is.
        """
        poll_s, call = min(_POLL_S, callbacks.limit_s / 8), StuckCall(self)
        with self.changed:
            self.awaited[device] += 1
            number = self.awaited[device]
            while not self.changed.wait_for(lambda: self.ended >= number, None if poll_s == math.inf else poll_s):
                if device == 1:
                    callbacks.note_stuck(call)
                callbacks.give_up()
        callbacks.give_up()  # the call may have ended when the first devices gave up


@dataclass(eq=False)
class StuckCall:
    """Whether a call waits for threads that the devices hold which wait for it.

    Such a call uses no processor. It waits in jax, or it has made an array on one device that jax never copies, as a
    probe of another copy never ends.

    Args:
        calls: of its operator.
        used_s: processor seconds of its thread.
        since: the time from which on it used no more.
        probe: an array that jax copies on a thread of its own.
        unready: arrays on one CPU device that were not there yet when the probe was made.
    """

    calls: Calls
    used_s: float = -1.0
    since: float = 0.0
    probe: Any = None
    unready: tuple[Any, ...] = ()

    def error(self, limit_s: float) -> ClusterError | None:
        """The error of a call that is stuck for ``limit_s`` seconds; None of one that is not."""
        thread, now = self.calls.thread, time.monotonic()
        used_s = _processor_s(thread)
        if used_s is None or used_s != self.used_s:
            self.used_s, self.since, self.probe = -1.0 if used_s is None else used_s, now, None
            return None
        if self.probe is None:
            if now - self.since > limit_s / 2:
                self.unready, self.probe = _unready(), _probe()
            return None
        frames = _frames(thread)
        if now - self.since < limit_s or not frames or self.probe.is_ready():
            return None
        if not frames[0].f_globals.get("__name__", "").startswith("jax.") and not any(map(_is_unready, self.unready)):
            return None
        return ClusterError(
            f"a callback has waited for {limit_s:g} s for a thread of jax's CPU client; the devices of its step hold "
            "all of them, and wait for the callback",
            cause="it hands jax a numpy array of its own of 100 kB or more, which a thread of the client copies, or "
            "it computes on several devices",
            remedy="numpy alone in the callback; or more threads: NPROC=16 in the environment before jax starts, or a "
            "device that the step does not use; AUTOPAR_WAIT_S=600 waits longer",
            source=_user_line(frames),
        )


def _processor_s(thread: int) -> float | None:
    """Processor seconds of a thread; None where there is none, or the system does not tell."""
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread)) if thread else None
    return None


def _frames(thread: int) -> list[Any]:
    """Python's frames of a thread, the innermost first."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _user_line(frames: Sequence[Any]) -> str | None:
    """The innermost line that is neither of jax nor of autopar."""
    for frame in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("jax", "autopar"):
            code = frame.f_code
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({code.co_name})"
    return None


def _is_unready(array: Any) -> bool:
    return not array.is_deleted() and not array.is_ready()


def _unready() -> tuple[Any, ...]:
    """Arrays on one CPU device that are not there yet. Those of a step that waits are on several."""
    arrays = [a for a in jax.live_arrays("cpu") if len(a.sharding.device_set) == 1]
    return tuple(a for a in arrays if _is_unready(a))


def _probe() -> jax.Array:
    """An array that is not there before a thread of jax's CPU client has copied it."""
    memory = np.empty(_COPIED_BYTES + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT + 1
    array: jax.Array = jax.device_put(memory[start : start + _COPIED_BYTES - 1], _cpu())
    return array


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
