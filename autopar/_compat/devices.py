"""Devices of this process, or of all processes of its world, as jax describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
