"""What a Ray cluster has: machines with their devices, from its table of nodes, and room for workers on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.runtime.ray.cluster import Slot

#: Kinds of devices; "auto" takes what there is: GPUs, else TPUs, else CPUs.
Devices: TypeAlias = Literal["auto", "cpu", "gpu", "tpu"]
KINDS = ("gpu", "tpu", "cpu")

#: What jax calls platforms.
_PLATFORMS: Mapping[str, str] = MappingProxyType({"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"})
#: Ray's resource of a kind of devices.
_RESOURCES: Mapping[str, str] = MappingProxyType({"gpu": "GPU", "tpu": "TPU"})
_TYPE = "accelerator_type:"
#: The cluster file of devices that Ray calls so. Of A100s it says the memory only sometimes.
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "V100": "p3.16xlarge", "A100": "dgx-a100", "A100-40G": "dgx-a100-40gb", "A100-80G": "dgx-a100",
        "H100": "dgx-h100", "H200": "h200", "B200": "b200",
        "TPU-V4": "tpu-v4", "TPU-V5LITEPOD": "tpu-v5e", "TPU-V5P": "tpu-v5p", "TPU-V6E": "tpu-v6e",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A node of Ray that is alive.

    Args:
        address: its address.
        cpus: number of its CPUs that Ray counts.
        gpus: number of its GPUs.
        tpus: number of its TPU chips.
        type: what Ray calls its devices, as ``H100``; empty where it does not say.
    """

    address: str
    cpus: int
    gpus: int = 0
    tpus: int = 0
    type: str = ""

    def devices(self, kind: str) -> int:
        """Number of its devices of a kind."""
        return {"gpu": self.gpus, "tpu": self.tpus, "cpu": self.cpus}[kind]


def machines(table: Sequence[Mapping[str, Any]]) -> tuple[Machine, ...]:
    """The nodes that are alive, by address.

    Args:
        table: what ``ray.nodes()`` returns.
    """
    found = []
    for node in table:
        if not node["Alive"]:
            continue
        resources: Mapping[str, float] = node["Resources"]
        types = sorted(name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE))
        address = str(node.get("NodeManagerAddress", ""))
        cpus, gpus, tpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU", "TPU"))
        # The most specific name: A100 and A100-40G stand for one device.
        found.append(Machine(address, cpus, gpus, tpus, max(types, key=len, default="")))
    return tuple(sorted(found, key=lambda m: m.address))


@dataclass(frozen=True)
class Layout:
    """Equal workers on machines.

    Args:
        kind: of their devices.
        workers: number of workers.
        devices: of each.
        file: name or path of the cluster file with the figures of such devices.
    """

    kind: str
    workers: int
    devices: int
    file: str

    @property
    def slot(self) -> Slot:
        """Room for one worker."""
        return Slot(self.devices, _PLATFORMS[self.kind], _RESOURCES.get(self.kind, ""))

    def room(self, found: Sequence[Machine]) -> int:
        """How many such workers the machines have room for.

        Args:
            found: machines that are alive.
        """
        if self.kind == "cpu":  # devices are virtual: a worker wants one CPU
            return sum(m.cpus for m in found)
        return sum(m.devices(self.kind) // self.devices for m in found)

    def cluster_name(self) -> str:
        """Name of the cluster to plan with."""
        return f"ray-{self.file.removeprefix('local-')}"


def layout(
    found: Sequence[Machine], devices: Devices, workers: int | None, each: int | None, like: str | None
) -> Layout:
    """Workers for the machines of a cluster.

    Args:
        found: machines that are alive.
        devices: what kind to use.
        workers: number of workers; None takes 2 of CPUs, and of others as many as there is room for.
        each: devices of each; None takes 4 virtual ones of CPUs, and of others all of a machine, of the machine that
            has least.
        like: name or path of a cluster file; None takes that of the devices.

    Raises:
        ClusterError: the machines do not have as many, or no file is known for them.
    """
    if devices not in ("auto", *KINDS):
        raise ClusterError(f"devices={devices!r} is no kind of devices", remedy='give "auto", "gpu", "tpu" or "cpu"')
    kind = next(k for k in KINDS if any(m.devices(k) for m in found) or k == "cpu") if devices == "auto" else devices
    if kind == "cpu":
        made = Layout(kind, workers or 2, each or 4, like or "local-cpu")
        if made.room(found) < made.workers:
            raise ClusterError(
                f"{made.workers} workers need a CPU each; Ray has {made.room(found)}",
                remedy="ask for fewer workers, or start Ray with --num-cpus",
            )
        return made
    having = [m for m in found if m.devices(kind)]
    name = kind.upper()
    if not having:
        raise ClusterError(f"no machine of the cluster has a {name}", remedy='ask for devices="cpu"')
    types = sorted({m.type for m in having})
    if like is None:
        if len(types) > 1 or types[0] not in _FILES:
            raise ClusterError(
                f"{name}s of type {', '.join(t or 'unknown' for t in types)}: no one cluster file has their figures",
                remedy="give one as like=, as Cluster.load takes it",
            )
        like = _FILES[types[0]]
    if each is None:
        each = min(m.devices(kind) for m in having)
        if workers is not None and len(having) == 1:  # a machine of its own is shared by the workers
            each = max(1, each // workers)
    free = Layout(kind, 1, each, like).room(found)
    made = Layout(kind, free if workers is None else workers, each, like)
    if free < made.workers or made.workers == 0:
        raise ClusterError(
            f"{made.workers} workers of {each} {name}s each were asked for; the machines have room for {free}",
            cause=f"they have {', '.join(str(m.devices(kind)) for m in having)}",
            remedy="ask for fewer workers, or fewer devices_per_worker",
        )
    return made


def planned(wanted: Layout) -> Cluster:
    """The cluster to plan with: each worker is a node.

    Args:
        wanted: the workers.
    """
    group = Cluster.load(wanted.file).groups[0]
    group = dataclasses.replace(group, count=wanted.workers, devices_per_node=wanted.devices)
    return Cluster(wanted.cluster_name(), (group,))
