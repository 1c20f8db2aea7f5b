"""Compiling a StableHLO module's text for the devices of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import backend
from jaxlib import xla_client


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
