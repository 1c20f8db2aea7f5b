"""``tpu:KIND:TOPOLOGY``, as ``tpu:v5p:4x4x4``: a slice of chips joined by their own links.

libtpu compiles for any topology that it knows the name of; jax reaches it by
``jax.experimental.topologies.get_topology_desc``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax.experimental import mesh_utils, topologies

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.lower.aot.base import Target, resized

#: Kind of chip: (cluster file, dims of its torus). v4 and v5p are reached as one device a chip (megacore).
KINDS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"v4": ("tpu-v4", 3), "v5e": ("tpu-v5e", 2), "v5p": ("tpu-v5p", 3), "v6e": ("tpu-v6e", 2)}
)
#: Hz of the cores: peak bf16 FLOP/s of the cluster file over FLOPs a cycle of all multipliers of a chip (2 x 128 x 128
#: of each of 4 on v5e, 8 on v4 and v5p; 2 x 256 x 256 of each of 4 on v6e). The compiler's own cycles of a product of
#: 4096^3 are 97% (v5e), 96% (v5p) and 87% (v6e) of that rate; of v4 half of it, so that its cycles are of one core.
CLOCKS_HZ: Mapping[str, float] = MappingProxyType({"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9})


@dataclass(frozen=True)
class TpuTarget(Target):
    """A slice.

    Args:
        kind: a key of `KINDS`.
        dims: chips along each dim of the torus.
    """

    kind: str
    dims: tuple[int, ...]
    platform = "tpu"
    extra = "tpu"

    @property
    def num_devices(self) -> int:
        """Number of devices that the compiler compiles for."""
        return math.prod(self.dims)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of modules that have to be installed."""
        return ("libtpu",)

    def cluster(self) -> Cluster:
        """The kind's cluster with as many hosts as the slice has."""
        return resized(Cluster.load(KINDS[self.kind][0]), self.num_devices)

    @property
    def clock_hz(self) -> float | None:
        """Clock of the cores, by which the compiler's estimate in cycles becomes seconds."""
        return CLOCKS_HZ[self.kind]

    def environment(self, num_devices: int) -> dict[str, str]:
        """No look for a real TPU, and no lock that keeps others from theirs."""
        return {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

    def device_grid(self, shape: tuple[int, ...]) -> Any:
        """The chips so that each axis of ``shape`` is a ring of neighbours where the torus allows it."""
        # The compiler knows no slice of one chip: it is one of a host's four.
        dims = self.dims if self.num_devices > 1 else (2, 2, 1)[: len(self.dims)]
        name = f"{self.kind}:{'x'.join(map(str, dims))}"
        devices = topologies.get_topology_desc(name, platform="tpu").devices[: self.num_devices]
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def parse_tpu(text: str) -> TpuTarget:
    """The target of ``tpu:v5p:4x4x4``; AutoparError for another form, kind or number of dims."""
    match = re.fullmatch(r"tpu:(\w+):(\d+(?:x\d+)*)", text)
    kind = match[1] if match else ""
    dims = tuple(int(n) for n in match[2].split("x")) if match else ()
    if not match or kind not in KINDS or len(dims) != KINDS[kind][1] or not all(dims):
        forms = ", ".join(f"tpu:{k}:{'x'.join('4' * n)}" for k, (_, n) in KINDS.items())
        raise AutoparError(f"{text!r} is not a TPU target", remedy=f"write the chip and its topology: {forms}")
    return TpuTarget(text, kind, dims)
