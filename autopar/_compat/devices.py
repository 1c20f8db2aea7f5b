"""What jax says about this process's devices."""

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
        memory_bytes: bytes that jax may allocate on it, or None where it does not say (CPU).
    """

    platform: str
    kind: str
    memory_bytes: int | None


def local_devices(devices: Sequence[Any] | None = None) -> tuple[FoundDevice, ...]:
    """The given jax devices, or all of this process.

    Args:
        devices: `jax.Device` objects, or None.
    """
    if devices is None:
        import jax  # here, so that the planner floors can be imported without jax

        devices = jax.local_devices()
    return tuple(FoundDevice(d.platform, d.device_kind, _memory_bytes(d)) for d in devices)


def _memory_bytes(device: Any) -> int | None:
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return int(limit) if limit else None
