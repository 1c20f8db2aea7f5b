"""Machines of a Ray cluster with their devices, from its table of nodes, and room for workers on them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.cluster import Cluster
from autopar.cluster.ray_options import Devices
from autopar.errors import ClusterError
from autopar.runtime.ray.cluster import Slot

#: Kinds of devices; "auto" takes what there is: GPUs, else TPUs, else CPUs.
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
    machines_of_table = []
    for node in table:
        if not node["Alive"]:
            continue
        resources: Mapping[str, float] = node["Resources"]
        types = sorted(name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE))
        address = str(node.get("NodeManagerAddress", ""))
        cpus, gpus, tpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU", "TPU"))
        # The most specific name: A100 and A100-40G stand for one device.
        machines_of_table.append(Machine(address, cpus, gpus, tpus, max(types, key=len, default="")))
    return tuple(sorted(machines_of_table, key=lambda m: m.address))


@dataclass(frozen=True)
class WorkerKind:
    """Equal workers.

    Args:
        count: how many there are.
        devices: of each.
        file: name or path of the cluster file with the figures of such devices.
        type: what Ray calls their devices; empty where any machine will do.
    """

    count: int
    devices: int
    file: str
    type: str = ""


@dataclass(frozen=True)
class WorkerPlacement:
    """Workers on machines.

    Args:
        kind: of their devices.
        workers: kinds of workers, in the order of the cluster's devices.
    """

    kind: str
    workers: tuple[WorkerKind, ...]

    @property
    def count(self) -> int:
        """Number of workers."""
        return sum(w.count for w in self.workers)

    @property
    def platform(self) -> str:
        """Name of the devices' platform in jax."""
        return _PLATFORMS[self.kind]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Room for one worker of each kind; machines are named by type where there are several."""
        several = len({w.type for w in self.workers}) > 1
        resource = _RESOURCES.get(self.kind, "")
        return tuple(
            Slot(w.devices, self.platform, resource, machine=_TYPE + w.type if several and w.type else "")
            for w in self.workers
        )

    def room(self, machines: Sequence[Machine]) -> tuple[int, ...]:
        """Number of workers of each kind for which the machines have room, at most the wanted ones.

        Args:
            machines: that are alive.
        """
        # Devices are virtual where they are CPUs: a worker wants one CPU, whatever it has.
        wants = [1 if self.kind == "cpu" else w.devices for w in self.workers]
        free = [m.devices(self.kind) for m in machines]
        room = [0] * len(self.workers)
        for k in sorted(range(len(self.workers)), key=lambda k: -wants[k]):
            worker = self.workers[k]
            for m, machine in enumerate(machines):
                if worker.type in ("", machine.type):
                    taken = min(worker.count - room[k], free[m] // wants[k])
                    room[k] += taken
                    free[m] -= taken * wants[k]
        return tuple(room)

    def cluster_name(self) -> str:
        """Name of the cluster to plan with."""
        return "ray-" + "-".join(dict.fromkeys(w.file.removeprefix("local-") for w in self.workers))


def layout(
    machines: Sequence[Machine],
    devices: Devices,
    workers: int | None,
    each: int | Sequence[int] | None,
    like: str | Mapping[str, str] | None,
) -> WorkerPlacement:
    """Workers for the machines of a cluster.

    Args:
        machines: that are alive.
        devices: what kind to use.
        workers: number of workers; None takes 2 of CPUs, and of others as many as there is room for.
        each: devices of each, or of every single one; None takes 4 virtual ones of CPUs, and of others all of a
            machine.
        like: name or path of a cluster file, or of one for each type of machine; None takes that of the devices.

    Raises:
        ClusterError: the machines do not have as many, or no file is known for them.
    """
    if devices not in ("auto", *KINDS):
        raise ClusterError(f"devices={devices!r} is not a kind of device", remedy='give "auto", "gpu", "tpu" or "cpu"')
    kind = next(k for k in KINDS if any(m.devices(k) for m in machines) or k == "cpu") if devices == "auto" else devices
    if isinstance(each, Sequence):
        if not each or (workers is not None and workers != len(each)):
            raise ClusterError(
                f"devices_per_worker names {len(each)} workers, and workers={workers}", remedy="leave workers out"
            )
        workers = len(each)
    if kind == "cpu" and not isinstance(like, Mapping):
        return _on_any_machine(machines, [each or 4] * (workers or 2) if not isinstance(each, Sequence) else each, like)
    return _by_machine(machines, kind, workers, each, like)


def _on_any_machine(machines: Sequence[Machine], sizes: Sequence[int], like: str | None) -> WorkerPlacement:
    """Workers with virtual devices: a CPU each, on whichever machine."""
    counts = Counter(sizes)
    wanted = WorkerPlacement("cpu", tuple(WorkerKind(n, size, like or "local-cpu") for size, n in counts.items()))
    room = sum(m.cpus for m in machines)
    if room < wanted.count:
        raise ClusterError(
            f"{wanted.count} workers need a CPU each; Ray has {room}",
            remedy="ask for fewer workers, or start Ray with --num-cpus",
        )
    return wanted


def _by_machine(
    machines: Sequence[Machine],
    kind: str,
    workers: int | None,
    each: int | Sequence[int] | None,
    like: str | Mapping[str, str] | None,
) -> WorkerPlacement:
    """Workers with devices of machines, each kind of machines with figures of its own."""
    known = like if isinstance(like, Mapping) else {}
    having = [m for m in machines if m.devices(kind) and (kind != "cpu" or m.type in known)]
    name = kind.upper()
    if not having:
        raise ClusterError(f"no machine of the cluster has a {name}", remedy='ask for devices="cpu"')
    rows = Counter[tuple[str, int]]()
    for type, size in _sizes(having, kind, workers, each):
        rows[type, size] += 1
    wanted = WorkerPlacement(
        kind, tuple(WorkerKind(n, size, _file(name, type, like), type) for (type, size), n in sorted(rows.items()))
    )
    asked = rows.total() if workers is None else workers
    if rows.total() < asked or not asked:
        sizes = each if isinstance(each, Sequence) else sorted({size for _, size in rows} or {each or 0})
        raise ClusterError(
            f"{asked} workers of {', '.join(map(str, sizes))} {name}s each were asked for; "
            f"the machines have room for {rows.total()}",
            cause=f"they have {', '.join(str(m.devices(kind)) for m in having)}",
            remedy="ask for fewer workers, or fewer devices_per_worker",
        )
    return wanted


def _sizes(
    having: Sequence[Machine], kind: str, workers: int | None, each: int | Sequence[int] | None
) -> list[tuple[str, int]]:
    """(type of machine, devices) of each worker that there is room for."""
    if kind == "cpu":
        sizes = list(each) if isinstance(each, Sequence) else [each or m.cpus for m in having]
        return [(m.type, size) for m, size in zip(having, sizes, strict=False)][:workers]
    if isinstance(each, Sequence):
        free = {m.address: m.devices(kind) for m in having}
        slots = []
        for size in sorted(each, reverse=True):
            # The machine in which least is left.
            fits = [m for m in having if free[m.address] >= size]
            if fits:
                best = min(fits, key=lambda m: (free[m.address], m.address))
                free[best.address] -= size
                slots.append((best.type, size))
        return slots
    if each is None and workers is not None and len(having) == 1:  # a machine of its own is shared by the workers
        each = max(1, having[0].devices(kind) // workers)
    slots = [
        (m.type, each or m.devices(kind)) for m in having for _ in range(m.devices(kind) // (each or m.devices(kind)))
    ]
    return sorted(slots, key=lambda row: (-row[1], row[0]))[:workers]


def _file(name: str, type: str, like: str | Mapping[str, str] | None) -> str:
    """The cluster file of machines."""
    if isinstance(like, str):
        return like
    known = {**_FILES, **(like or {})}
    if type not in known:
        raise ClusterError(
            f"{name}s of type {type or 'unknown'}: no cluster file has their figures",
            remedy='give one as like=, as Cluster.load takes it, or one for each type: like={"L4": "l4.toml"}',
        )
    return known[type]


def planned(wanted: WorkerPlacement) -> Cluster:
    """The cluster to plan with: each worker is a node, workers of one kind are a group.

    Args:
        wanted: the workers.
    """
    groups = tuple(
        dataclasses.replace(Cluster.load(w.file).groups[0], count=w.count, devices_per_node=w.devices)
        for w in wanted.workers
    )
    return Cluster(wanted.cluster_name(), groups)
