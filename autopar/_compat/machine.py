"""The processor or accelerator of this machine by name, and the versions of what it runs."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path


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
