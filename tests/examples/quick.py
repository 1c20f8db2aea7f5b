"""Compiling for tests: XLA spends most of the time of small programs on optimizing them."""

from collections.abc import Callable
from typing import Any

import jax


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` with little optimization."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def quick_metrics(step: Callable[..., Any]) -> Callable[..., Any]:
    """The metrics of a train step; without the state the backward pass is not compiled."""
    return quick_jit(lambda *args: step(*args)[1])
