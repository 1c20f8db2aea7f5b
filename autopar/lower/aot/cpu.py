"""``cpu``: virtual devices of this machine's processor, as many as the plan wants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.cluster import Cluster
from autopar.lower.aot.base import Target, resized


@dataclass(frozen=True)
class CpuTarget(Target):
    """``cpu``, or ``cpu:N`` for N devices."""

    count: int | None = None
    platform = "cpu"
    needs = ()
    extra = ""

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the compiler compiles for; None where any number will do."""
        return self.count

    def cluster(self) -> Cluster:
        """``local-cpu``: 8 devices, or ``count`` of them."""
        cluster = Cluster.load("local-cpu")
        return cluster if self.count is None else resized(cluster, self.count)

    def environment(self, num_devices: int) -> dict[str, str]:
        """Environment variables of the process that compiles."""
        return {"JAX_NUM_CPU_DEVICES": str(num_devices)}

    def device_grid(self, shape: tuple[int, ...]) -> Any:
        """Devices of the compiling process as a numpy array of ``shape``."""
        return np.array(jax.devices("cpu")[: math.prod(shape)], dtype=object).reshape(shape)
