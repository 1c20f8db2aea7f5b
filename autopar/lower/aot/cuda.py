"""``cuda:DEVICE:NODESxDEVICES``, as ``cuda:h100:8x8``: nodes of GPUs, described to XLA by a text proto.

XLA's GPU compiler needs no GPU where it is given the device's description (``GpuTargetConfigProto``). The files
in ``devices/`` hold the figures of public data sheets and of the CUDA programming guide's table of compute
capabilities. What is measured on a GPU (the choice among algorithms of a matrix product) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.experimental import topologies

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.lower.aot.base import Target, resized

#: Device: the cluster file whose nodes hold it.
KINDS: Mapping[str, str] = MappingProxyType(
    {"v100": "p3.16xlarge", "a100": "dgx-a100", "h100": "dgx-h100", "h200": "h200", "b200": "b200"}
)


@dataclass(frozen=True)
class CudaTarget(Target):
    """Nodes of GPUs.

    Args:
        kind: a key of `KINDS`.
        nodes: how many.
        devices_per_node: GPUs of each.
    """

    kind: str
    nodes: int
    devices_per_node: int
    platform = "cuda"
    extra = "cuda12-aot"

    @property
    def num_devices(self) -> int:
        """Number of devices that the compiler compiles for."""
        return self.nodes * self.devices_per_node

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of modules that have to be installed."""
        return ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")

    def cluster(self) -> Cluster:
        """The kind's cluster with these nodes."""
        cluster = Cluster.load(KINDS[self.kind], self.nodes)
        if cluster.groups[0].devices_per_node == self.devices_per_node:
            return cluster
        return resized(cluster, self.num_devices, self.devices_per_node)

    def environment(self, num_devices: int) -> dict[str, str]:
        """The plugin is not to look for CUDA libraries that only running needs."""
        return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

    def device_grid(self, shape: tuple[int, ...]) -> Any:
        """The GPUs node by node."""
        described = (Path(__file__).parent / "devices" / f"{self.kind}.txtpb").read_text(encoding="utf-8")
        # Slices, hosts of a slice, devices of a host. What one slice holds is taken to be joined by NVLink.
        topology = f"{self.nodes}x1x{self.devices_per_node}"
        description = topologies.get_topology_desc(
            self.kind, platform="cuda", target_config=described, topology=topology
        )
        return np.array(description.devices, dtype=object).reshape(shape)

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """No measuring of algorithms: there is no GPU to measure on. What kernels are estimated to cost is written."""
        return {"xla_gpu_autotune_level": "0", "xla_gpu_collect_cost_model_stats": True}


def parse_cuda(text: str) -> CudaTarget:
    """The target of ``cuda:h100:8x8``; AutoparError for another form or device."""
    match = re.fullmatch(r"cuda:(\w+):([1-9]\d*)x([1-9]\d*)", text)
    if not match or match[1] not in KINDS:
        raise AutoparError(
            f"{text!r} is not a CUDA target",
            remedy=f"write cuda:DEVICE:NODESxDEVICES, as cuda:h100:8x8; devices: {', '.join(KINDS)}",
        )
    return CudaTarget(text, match[1], int(match[2]), int(match[3]))
