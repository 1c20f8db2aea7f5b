"""Computation on the host of a device: a context in jax before 0.12, a function of arrays since."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import compute_on

_IS_CONTEXT = "out_memory_spaces" not in inspect.signature(compute_on.compute_on).parameters


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
