"""XLA's flags in the environment of a process that is started."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def xla_flags(environment: Mapping[str, str], cpu_devices: int | None = None) -> str:
    """``XLA_FLAGS`` of an environment with another number of virtual CPU devices; None takes jax's own.

    Args:
        environment: of the process that starts the other.
        cpu_devices: how many the other has.
    """
    others = re.sub(rf"{_DEVICE_COUNT}=\S*", "", environment.get("XLA_FLAGS", "")).split()
    return " ".join([*others, *([] if cpu_devices is None else [f"{_DEVICE_COUNT}={cpu_devices}"])])
