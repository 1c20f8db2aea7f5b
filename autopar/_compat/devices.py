"""Devices of this process, or of all processes of its world, as jax describes them; names of processors.

`local_devices` describes devices as plain data, `machine_name` names the processor or accelerator, and `xla_flags`
gives a process that is started another number of virtual CPU devices. Importing this module does not import jax.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device that jax has.

    Args:
        platform: "cpu", "gpu" or "tpu".
        kind: jax's ``device_kind``, as ``NVIDIA H200``.
        memory_bytes: bytes that jax may allocate on it, or None where it does not say (CPU, other processes).
        process: number of the process that it belongs to.
        slice: number of its TPU slice; of GPUs, of the machines that one fast network joins.
    """

    platform: str
    kind: str
    memory_bytes: int | None
    process: int = 0
    slice: int = 0


def world_devices() -> tuple[Any, ...]:
    """All jax devices of all processes, node by node: the order in which a cluster numbers them."""
    import jax  # here, so that the planner floors can be imported without jax

    if jax.process_count() == 1:
        return tuple(jax.devices())
    size: dict[tuple[str, int, int], int] = {}
    for d in jax.devices():
        size[_node(d)] = size.get(_node(d), 0) + 1
    return tuple(
        sorted(jax.devices(), key=lambda d: (d.device_kind, -size[_node(d)], _slice(d), d.process_index, d.id))
    )


def local_devices(devices: Sequence[Any] | None = None) -> tuple[FoundDevice, ...]:
    """The given jax devices, or all of this process's world.

    Args:
        devices: `jax.Device` objects, or None.
    """
    devices_here = world_devices() if devices is None else devices
    return tuple(
        FoundDevice(d.platform, d.device_kind, _memory_bytes(d), getattr(d, "process_index", 0), _slice(d))
        for d in devices_here
    )


def _node(device: Any) -> tuple[str, int, int]:
    """Key of the node of a device: the process of a CPU, else the machine or slice."""
    process = device.process_index if device.platform == "cpu" else 0
    return device.device_kind, _slice(device), process


def _slice(device: Any) -> int:
    return int(getattr(device, "slice_index", None) or 0)


def _memory_bytes(device: Any) -> int | None:
    import jax  # here, so that the planner floors can be imported without jax

    if device.platform == "cpu" or getattr(device, "process_index", 0) != jax.process_index():
        return None
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return int(limit) if limit else None


def machine_name(platform_name: str, device_kind: str) -> str:
    """Name of a device: of the CPU the processor, or its architecture where the system does not say.

    Args:
        platform_name: of the device, as jax names it.
        device_kind: likewise.
    """
    if platform_name != "cpu":
        return device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.machine()


def jax_version() -> str:
    """The version of jax, as ``jax 0.10.2``."""
    return f"jax {metadata.version('jax')}"


def xla_flags(environment: Mapping[str, str], cpu_devices: int | None = None) -> str:
    """``XLA_FLAGS`` of an environment with another number of virtual CPU devices; None takes jax's own.

    Args:
        environment: of the process that starts the other.
        cpu_devices: how many the other has.
    """
    others = re.sub(rf"{_DEVICE_COUNT}=\S*", "", environment.get("XLA_FLAGS", "")).split()
    return " ".join([*others, *([] if cpu_devices is None else [f"{_DEVICE_COUNT}={cpu_devices}"])])
