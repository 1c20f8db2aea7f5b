"""Compiled programs by names that jax does not promise: a module compiled, computation on hosts, results, errors.

`compile_module` compiles StableHLO for devices of this process, `on_host` has the host compute, `leave_uncommitted`
and `with_value` set properties of results, and `floating_point_error` reads the error of ``jax_debug_nans``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import compute_on
from jax.extend import backend
from jaxlib import xla_client

_IS_CONTEXT = "out_memory_spaces" not in inspect.signature(compute_on.compute_on).parameters


@dataclass(frozen=True)
class CompiledModule:
    """A module compiled by XLA.

    Args:
        text: its optimized HLO.
        memory: sizes that the compiler's buffer assignment has.
        device_kind: the compiler's name of the devices.
    """

    text: str
    memory: Any
    device_kind: str


def compile_module(text: str, devices: Sequence[Any]) -> CompiledModule:
    """Compiles a module with Shardy's shardings as one program over ``devices``.

    Args:
        text: the module, in MLIR's text.
        devices: as many as its mesh has.
    """
    options = backend.get_compile_options(1, len(devices), np.arange(len(devices)).reshape(1, -1))
    build: Any = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    client: Any = devices[0].client
    executable = client.compile_and_load(text, xla_client.DeviceList(tuple(devices)), options)
    return CompiledModule(
        str(executable.hlo_modules()[0].to_string()),
        executable.get_compiled_memory_stats(),
        str(devices[0].device_kind),
    )


def on_host(function: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> Sequence[Any]:
    """Results of a function that the host computes, of arrays in its memory and in its memory.

    Args:
        function: of arrays, a list or tuple of arrays.
        arrays: what it takes.
    """
    asked: Any = compute_on.compute_on
    if _IS_CONTEXT:
        with asked("device_host"):
            return function(*arrays)
    there = asked(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    outputs: Sequence[Any] = there(*arrays)
    return outputs


def leave_uncommitted(compiled: Any) -> bool:
    """Makes a compiled program return uncommitted arrays; called before it runs. Returns whether this jax can.

    A program that has shardings returns committed arrays, though a jitted function without them does not.

    Args:
        compiled: what `jax.stages.Lowered.compile` made, for one device.
    """
    try:
        from jax._src.interpreters import pxla

        program = compiled._executable.unsafe_call
        before = program.out_handler
        program.out_handler = pxla.global_avals_to_results_handler(before.out_avals, before.out_shardings, False)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def with_value(array: Any, value: Any) -> Any:
    """An array whose values the host has already; jax's threads would copy them when they are asked for.

    Args:
        array: complete, on one device.
        value: the same as numpy, which is read-only from now on.
    """
    value.flags.writeable = False
    array._npy_value = value
    return array


def floating_point_error(error: BaseException, name: str) -> FloatingPointError | None:
    """The error that a jitted function raises where a compiled program raised ``error``; None for other errors.

    Args:
        error: what a compiled program raised.
        name: of the function.
    """
    if type(error).__name__ != "InternalFloatingPointError":
        return None
    what = getattr(error, "ty", "nan")
    return FloatingPointError(
        f"invalid value ({what}) encountered in the results of {name}; the plain function under jax.disable_jit() says "
        "in which operator"
    )
