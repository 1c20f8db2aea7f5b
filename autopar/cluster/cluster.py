"""`Cluster`: groups of nodes, where they are read from, and the logical meshes that they allow."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar._compat.devices import FoundDevice, local_devices
from autopar.cluster.catalog import Figures, available, figures_of, find, kept_group, read
from autopar.cluster.checks import text
from autopar.cluster.device import Device
from autopar.cluster.file import parse, plain
from autopar.cluster.group import NodeGroup
from autopar.cluster.mesh import AXIS_NAMES, DevicePlace, LogicalMesh, arrange, distinct, mesh_shapes, places
from autopar.cluster.ray_options import Devices, RayOptions, Transport
from autopar.cluster.stack import DEFAULT_STACK, StackChoice, plain_stack, stack_of
from autopar.errors import ClusterError
from autopar.hooks import HOOKS

#: Nodes of a cluster; more are taken for a mistake.
MOST_NODES = 2**16


@dataclass(frozen=True)
class Cluster:
    """Groups of equal nodes. Devices are numbered group by group, node by node.

    Args:
        name: name that a person knows.
        groups: one for a uniform cluster, several for a mixed one.
        stack: the kind of program that runs on it, which decides what is fused, what starts kernels and what overlaps:
            "xla" for what autopar compiles; `cost_models/training/constants.toml` has all. An
            `autopar.cluster.AdjustedStack` is one of them with other constants.

    Raises:
        ClusterError: there is no group.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    stack: StackChoice = field(default=DEFAULT_STACK, kw_only=True)

    def __post_init__(self) -> None:
        text("Cluster.name", self.name)
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ClusterError(f"cluster {self.name!r} has no node groups", remedy="give at least one NodeGroup")

    @staticmethod
    def load(
        name_or_path: str | os.PathLike[str], nodes: int | None = None, *, stack: StackChoice = DEFAULT_STACK
    ) -> Cluster:
        """Reads a cluster file.

        Args:
            name_or_path: one of the names of `autopar.cluster.available`, or a path of a TOML file.
            nodes: number of nodes instead of the file's, for a file with one group.
            stack: the kind of program that runs on it: "xla" is what autopar compiles, others predict what other
                programs would take, an `AdjustedStack` one of them with other constants.

        Raises:
            ClusterError: there is no such file, it is wrong, or ``nodes`` does not apply.
        """
        path = find(name_or_path)
        cluster = Cluster(*parse(read(path), path.name), stack=stack_of(stack))
        return cluster if nodes is None else cluster.with_nodes(nodes)

    @staticmethod
    def local(devices: Sequence[Any] | None = None, *, figures: Figures | None = None) -> Cluster:
        """This process's jax devices, as one node; under `jax.distributed` those of all processes, as several.

        Figures are those that this machine keeps of such devices (`autopar.calibrate` measures them), else those of the
        file that knows the kind of device; memory is the least of the file's and of what jax may allocate. CPU devices
        have the figures of ``local-cpu``. Of several processes each is a node with CPUs, each machine with GPUs, each
        host of a slice with TPUs; several slices are a node each. They have figures of files, which are the same in
        all processes.

        Args:
            devices: `jax.Device` objects of one kind, or None for all: of this process, or of all that jax joined.
            figures: "auto" as above, "list" for figures of files alone, "measured" to measure them now where the
                machine keeps none, which takes half a minute. None: what ``AUTOPAR_FIGURES`` says, else "auto".

        Raises:
            ClusterError: no devices, several kinds in one process, a kind that no file knows, or other figures.
        """
        wanted = figures_of(figures, os.environ)
        devices_here = local_devices(devices)
        kinds = sorted({d.kind for d in devices_here})
        several = len({d.process for d in devices_here}) > 1
        if not kinds or (len(kinds) > 1 and not several):
            what = f"kinds {', '.join(kinds)}" if kinds else "no devices"
            raise ClusterError(f"a local cluster needs devices of one kind, not {what}", remedy="pass devices=")
        if not several and wanted != "list":
            kept = kept_group(os.environ, devices_here)
            if kept is None and wanted == "measured":
                kept = HOOKS.function("measure devices")(devices)
            if kept is not None:
                name = f"local-{devices_here[0].platform}, measured {kept.measured}"
                return Cluster(name, (one_node(devices_here, kept),))
        sources = {k: _cluster_of("cpu" if devices_here[0].platform == "cpu" else k) for k in kinds}
        groups: list[NodeGroup] = []
        for kind, source in sources.items():
            same = [d for d in devices_here if d.kind == kind]
            groups += groups_of(same, source.groups[0]) if several else (one_node(same, source.groups[0]),)
        name = "-".join(s.name.removeprefix("local-") for s in sources.values())
        return Cluster(f"local-{name}", tuple(groups))

    @staticmethod
    def ray(
        address: str | None = None,
        *,
        workers: int | None = None,
        devices_per_worker: int | Sequence[int] | None = None,
        hosts_per_stage: int = 1,
        devices: Devices = "auto",
        like: str | Mapping[str, str] | None = None,
        object_store_bytes: int = 80 * 2**20,
        deadline_s: float = 300.0,
        recover: bool = False,
        copy_every: int = 10,
        cache: str | None = None,
        transport: Transport = "auto",
        start_s: float = 300.0,
        load_s: float = 900.0,
        attempts: int = 10,
        repeats: int = 3,
        runtime_env: Mapping[str, Any] | None = None,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        backoff_s: float = 0.5,
    ) -> Cluster:
        """Workers on Ray, each a process with its own devices: nodes of a cluster to plan for, and to run on.

        Connects to a running Ray cluster if there is an address, in ``RAY_ADDRESS`` too, or if this process is
        connected. Else Ray is started here: on loopback alone, without a dashboard, until this process ends.

        Args:
            address: of a running cluster, as ``host:6379``, or "auto" for one that runs on this machine.
            workers: number of worker processes; each is a node. None takes 2 with CPU devices, and as many as there is
                room for with others.
            devices_per_worker: devices of each, or of every single one as ``[2, 4, 4]``. None takes 4 virtual CPU
                devices, or all GPUs or TPUs of a machine.
            hosts_per_stage: workers that hold a stage together, where ``num_stages`` is not said otherwise; several
                are a world of `jax.distributed` of their own.
            devices: kind of devices; "auto" takes the GPUs of a running cluster, else its TPUs, else virtual CPU
                devices, and these where Ray is started here.
            like: name or path of the cluster file with the figures of such devices, or one for each type of machine
                that Ray names (``accelerator_type``), as ``{"T4": "t4.toml"}``. None takes those of the types.
            object_store_bytes: shared memory of a Ray that is started here, for what driver and workers exchange.
            deadline_s: seconds that a step may take before `WorkerLostError`.
            recover: whether workers that are lost are replaced and the step is run again.
            copy_every: with ``recover``, steps between two copies of the workers' arrays in the driver's memory.
            cache: folder of compiled programs; None for one that goes with the cluster.
            transport: how arrays get from worker to worker: over "sockets", by way of the host; "direct", pulled from
                device to device; or in one "world" of `jax.distributed`, by collective-permutes on the devices of
                sender and receiver. The last two are not encrypted. "auto" takes "direct" for GPUs and TPUs of one
                machine, else "sockets".
            start_s: seconds that workers may take to start; with ``recover`` also to wait for a machine.
            load_s: seconds that compiling, connecting, making and reading arrays may take.
            attempts: with ``recover``, how often one call may be begun before it is given up.
            repeats: with ``recover``, how often in a row it may fail at one instruction of one worker.
            runtime_env: of the workers, as Ray takes it; variables that autopar sets itself win.
            resources: custom resources of Ray that each worker takes, on a running cluster.
            labels: of nodes that workers may be on, as Ray's ``label_selector``.
            backoff_s: with ``recover``, seconds before the third attempt of a call; twice that before the fourth, ...

        Raises:
            ClusterError: Ray does not start or answer, or has too few devices.
        """
        options = RayOptions(
            workers, devices_per_worker, hosts_per_stage, devices, like, object_store_bytes, deadline_s, recover,
            copy_every, cache, transport, start_s, load_s, attempts, repeats, runtime_env, resources, labels, backoff_s,
        )  # fmt: skip
        cluster: Cluster = HOOKS.function("connect to ray")(address, options)
        return cluster

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes; ClusterError if it has several groups."""
        if len(self.groups) != 1:
            raise ClusterError(
                f"nodes={nodes} does not say which of the {len(self.groups)} groups of {self.name!r} is meant",
                remedy="write the counts in a file of your own",
            )
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ClusterError(f"nodes={nodes!r} is not a number of nodes", remedy="give 1 or more")
        if nodes > MOST_NODES:
            raise ClusterError(
                f"nodes={nodes} is more than the {MOST_NODES} that a cluster may have",
                cause="planning lists the devices, which takes time and memory for each",
                remedy=f"give {MOST_NODES} or fewer",
            )
        return Cluster(self.name, (dataclasses.replace(self.groups[0], count=nodes),), stack=self.stack)

    def part(self, first: int, count: int) -> Cluster:
        """The cluster of ``count`` consecutive devices from number ``first`` on: some of a node, or whole nodes.

        Raises:
            ClusterError: the devices are neither inside one node nor whole nodes of one group.
        """
        start = 0
        for g in self.groups:
            offset = first - start
            if offset >= 0 and offset + count <= g.size and count >= 1:
                inside = offset // g.devices_per_node == (offset + count - 1) // g.devices_per_node
                if inside or g.inter == "intra":
                    group = dataclasses.replace(g, count=1, devices_per_node=count)
                    return Cluster(self.name, (group,), stack=self.stack)
                if offset % g.devices_per_node == 0 and count % g.devices_per_node == 0:
                    group = dataclasses.replace(g, count=count // g.devices_per_node)
                    return Cluster(self.name, (group,), stack=self.stack)
            start += g.size
        raise ClusterError(
            f"devices {first} to {first + count - 1} of {self.name!r} are neither part of one node nor whole nodes",
            remedy="give submeshes inside nodes, or of whole nodes",
        )

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """Number of the first device of each node group."""
        return (0, *itertools.accumulate(g.size for g in self.groups))[:-1]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return sum(g.count for g in self.groups)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(g.size for g in self.groups)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each index, in order."""
        return tuple(g.device for g in self.groups for _ in range(g.size))

    @cached_property
    def device_types(self) -> tuple[Device, ...]:
        """The different devices, in order of their first use."""
        return tuple(dict.fromkeys(g.device for g in self.groups))

    @property
    def has_slower_network(self) -> bool:
        """Whether there are several nodes, and some device sends less to another node than inside its own."""
        return self.num_nodes > 1 and any(g.is_network_slower for g in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that has least."""
        return min(d.memory_bytes for d in self.device_types)

    @cached_property
    def places(self) -> tuple[DevicePlace, ...]:
        """Node and links of each device, in their order."""
        return places(self.groups)

    @cached_property
    def _every_mesh(self) -> tuple[LogicalMesh, ...]:
        """All meshes over all devices. Links of an axis take as long as there are devices, and searches ask often."""
        return distinct([arrange(self.places, s) for s in mesh_shapes(self.num_devices)])

    def logical_meshes(self, shape: Sequence[int] | None = None) -> tuple[LogicalMesh, ...]:
        """Meshes over all devices: axes "x" (1-D) or "x", "y" (2-D), major first, the last with the nearest devices.

        Links are those of `autopar.cluster.mesh`. Of two meshes that differ only in the names and order of
        their axes one is returned.

        Args:
            shape: sizes of the axes of the only mesh wanted (1 to 4 of them), or None for all.

        Raises:
            ClusterError: ``shape`` does not fit the number of devices; it lists the shapes that do.
        """
        if shape is None:
            return self._every_mesh
        n, sizes = self.num_devices, tuple(shape)
        if not 1 <= len(sizes) <= len(AXIS_NAMES) or min(sizes) < 1 or math.prod(sizes) != n:
            possible = ", ".join("x".join(map(str, s)) for s in mesh_shapes(n))
            raise ClusterError(
                f"a mesh of shape {sizes} does not hold the {n} devices of {self.name!r}",
                remedy=f"shapes that do: {possible}",
            )
        return (arrange(self.places, sizes),)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in a cluster file; `from_dict` reads it back."""
        data = plain(self.name, self.groups)
        return data if self.stack == DEFAULT_STACK else {**data, "stack": plain_stack(self.stack)}

    @staticmethod
    def from_dict(data: Any) -> Cluster:
        """The cluster of plain data; ClusterError names the key that is wrong."""
        stack = data.get("stack", DEFAULT_STACK) if isinstance(data, dict) else DEFAULT_STACK
        rest = {k: v for k, v in data.items() if k != "stack"} if isinstance(data, dict) else data
        return Cluster(*parse(rest, "cluster"), stack=stack_of(stack))

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal clusters have equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(data: str | bytes) -> Cluster:
        """The cluster that `to_json` wrote; ClusterError if it is not one."""
        try:
            plain_data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ClusterError(f"not the JSON of a cluster: {error}") from error
        return Cluster.from_dict(plain_data)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        parts = [
            f"{g.count} x {g.devices_per_node} {g.device.kind}" + (f" (measured {g.measured})" if g.measured else "")
            for g in self.groups
        ]
        return f"{self.name}: {' + '.join(parts)}"


def _cluster_of(kind: str) -> Cluster:
    """The cluster that comes with autopar and whose first group's devices jax calls ``kind``."""
    known: list[str] = []
    # Files that do not name the kind come last: to read one as TOML takes milliseconds.
    for name in sorted(available(), key=lambda name: kind.encode() not in find(name).read_bytes()):
        cluster = Cluster.load(name)
        kinds = cluster.groups[0].device.jax_kinds
        if kind in kinds:
            return cluster
        known += kinds
    raise ClusterError(
        f"no cluster file knows devices of kind {kind!r}",
        cause=f"the files know {', '.join(sorted(known))}",
        remedy="write a file with jax_kinds, or load the nearest with Cluster.load and pass it as cluster=",
    )


def one_node(devices: Sequence[FoundDevice], like: NodeGroup) -> NodeGroup:
    """The group of the devices of one process.

    Args:
        devices: the devices, of one kind.
        like: what the cluster file of their kind says.
    """
    return dataclasses.replace(like, count=1, devices_per_node=len(devices), device=_limited(devices, like.device))


def groups_of(devices: Sequence[FoundDevice], like: NodeGroup) -> tuple[NodeGroup, ...]:
    """The groups of the devices of several processes, of one kind: one for each size of nodes.

    A node is a process with CPUs, a machine (or several that one fast network joins) with GPUs. Of TPUs it is a host of
    a slice where there is one slice; several slices are a node each, with their network between them.

    Args:
        devices: the devices, node by node.
        like: what the cluster file of their kind says.

    Raises:
        ClusterError: there are several slices, and the file does not know what joins them.
    """
    platform = devices[0].platform
    slices = _sizes([d.slice for d in devices])
    like = dataclasses.replace(like, device=_limited(devices, like.device))
    if platform == "cpu":
        nodes = _sizes([(d.slice, d.process) for d in devices])
    elif like.inter == "intra" and len(slices) == 1:
        hosts = _sizes([d.process for d in devices])
        nodes = hosts if len(set(hosts)) == 1 else slices
    else:
        nodes = slices
    if like.inter == "intra" and len(slices) > 1:
        if like.slices is None:
            raise ClusterError(
                f"{len(slices)} slices of {like.device.kind}, and their cluster file does not say what joins them",
                remedy="add [groups.slices] to a copy of the file, and pass it as cluster=",
            )
        like = dataclasses.replace(like, inter=like.slices)
    sizes = list(dict.fromkeys(nodes))
    return tuple(dataclasses.replace(like, count=nodes.count(n), devices_per_node=n) for n in sizes)


def _sizes(keys: Sequence[object]) -> list[int]:
    """Number of each key, in order of their first."""
    return [keys.count(k) for k in dict.fromkeys(keys)]


def _limited(devices: Sequence[FoundDevice], device: Device) -> Device:
    """``device`` with the least memory that jax may allocate on any of ``devices``, if that is less than its own."""
    limit = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=device.memory_bytes)
    return dataclasses.replace(device, memory_bytes=min(device.memory_bytes, limit))
