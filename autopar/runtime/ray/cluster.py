"""`RayCluster`: a cluster to plan with that is a Ray cluster to run on. Imports no ray."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from autopar._compat.devices import xla_flags
from autopar.cluster import Cluster, NodeGroup
from autopar.errors import ClusterError
from autopar.runtime.ray.deployment import Launcher
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.messages import Handshake
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.worker_group import WorkerGroup

#: As much of a resource that names a machine as Ray's own users ask for.
_TRACE = 0.001


@dataclass(frozen=True)
class Slot:
    """Room for one process with devices.

    Args:
        devices: how many it has.
        platform: jax's name of their kind.
        resource: Ray's name of their kind; empty for virtual CPU devices.
        shared: whether processes share the CPUs of one machine: nothing is set aside for them.
        custom: further resources of Ray that it takes, with their amounts.
        labels: of nodes that it may be on, as Ray's label selector.
        machine: Ray's resource of the machines that it may be on; empty for any.
    """

    devices: int
    platform: str
    resource: str = ""
    shared: bool = False
    custom: tuple[tuple[str, float], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    machine: str = ""

    def of(self, devices: int) -> Slot:
        """The slot with another number of devices."""
        return replace(self, devices=devices)

    @property
    def bundle(self) -> Mapping[str, float]:
        """Resources that Ray sets aside for it."""
        devices = {self.resource: float(self.devices)} if self.resource else {}
        return {"CPU": 1.0, **devices, **self._named}

    @property
    def _named(self) -> dict[str, float]:
        """Resources by names of their own: a trace of the machine's, and the user's."""
        return {**({self.machine: _TRACE} if self.machine else {}), **dict(self.custom)}

    @property
    def resources(self) -> Mapping[str, Any]:
        """Resources that the process takes of the bundle: arguments of ``actor.options``."""
        resources: dict[str, Any] = {"num_cpus": 0 if self.shared else 1}
        if self.resource == "GPU":
            resources["num_gpus"] = self.devices
        elif self.resource:
            resources["resources"] = {self.resource: self.devices}
        if self._named:
            resources["resources"] = {**resources.get("resources", {}), **self._named}
        if self.labels:
            resources["label_selector"] = dict(self.labels)
        return resources

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process: its number of devices stands in place of the driver's, other flags of XLA stay."""
        variables = {"JAX_PLATFORMS": self.platform}
        if self.platform == "cpu":
            flags = xla_flags(os.environ, self.devices)
            variables |= {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": str(self.devices)}
        return variables


@dataclass(frozen=True)
class RayCluster(Cluster):
    """Result of `autopar.Cluster.ray`. Only the name and the groups are compared and written to plans.

    Args:
        name: name that a person knows.
        groups: node groups: one for a uniform cluster, several for a mixed one.
        slots: room for workers, in the order of the cluster's devices.
        run: how pipelines are run here.
        launch: starts workers: (what each is told, its slot, seconds that it may take) -> their processes.
        disconnect: ends what was started for this cluster.
        worker_groups: workers that run, the latest last.
        hosts_per_stage: workers that hold a stage together, unless said otherwise.
        driver: of all functions that run on the cluster.
        kept: of a part of a cluster how many workers of each kind of the whole it has; empty for the whole.
    """

    slots: tuple[Slot, ...] = field(default=(), compare=False, repr=False)
    run: RunOptions = field(default=RunOptions(), compare=False, repr=False)
    launch: Launcher | None = field(default=None, compare=False, repr=False)
    disconnect: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    worker_groups: Sequence[WorkerGroup] = field(default=(), compare=False, repr=False)
    hosts_per_stage: int = field(default=1, compare=False, repr=False)
    driver: Driver | None = field(default=None, compare=False, repr=False)
    kept: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the workers on this machine that were started last."""
        return self.worker_groups[-1].processes if self.worker_groups else ()

    @property
    def num_stages(self) -> int:
        """Number of stages of a plan that is not told how many."""
        return max(1, len(self.slots) // self.hosts_per_stage)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of workers of each kind; 0 of those that are all gone."""
        return self.kept or tuple(g.count for g in self.groups)

    def fewer(self, nodes: Sequence[int]) -> RayCluster:
        """The cluster with so many workers of each kind at most: as many as are in whole groups of `hosts_per_stage`.

        Args:
            nodes: for each kind of the whole cluster.
        """
        whole = tuple(n - n % self.hosts_per_stage or n for n in nodes)
        kept = [(replace(g, count=n), k) for k, (g, n) in enumerate(zip(self.groups, whole, strict=True)) if n]
        first = (0, *itertools.accumulate(g.count for g in self.groups))
        slots = tuple(self.slots[first[k] + i] for g, k in kept for i in range(g.count))
        return replace(self, groups=tuple(g for g, _ in kept), slots=slots, kept=whole)

    def hosts(self, devices: Sequence[int]) -> int:
        """Number of processes that have these devices: one a node where they are whole nodes, else one.

        Args:
            devices: indices of devices that follow each other.
        """
        group, start = self._group(devices[0])
        node_devices = group.devices_per_node
        return (
            len(devices) // node_devices
            if len(devices) % node_devices == 0 and (devices[0] - start) % node_devices == 0
            else 1
        )

    def kind(self, device: int) -> int:
        """Kind of the worker that has a device, as a number of `nodes`."""
        group, _ = self._group(device)
        return [k for k, n in enumerate(self.nodes) if n][self.groups.index(group)]

    def _group(self, device: int) -> tuple[NodeGroup, int]:
        """The group that a device is in, and its first device."""
        return next((g, s) for g, s in reversed(list(zip(self.groups, self.group_starts, strict=True))) if s <= device)

    def start(self, handshakes: Sequence[Handshake], devices: Sequence[int], kinds: Sequence[int] = ()) -> WorkerGroup:
        """Starts processes.

        Args:
            handshakes: what each is told.
            devices: how many devices each has.
            kinds: of which kind of worker each is; all of the first where it is empty.

        Raises:
            ClusterError: they do not start.
        """
        if self.launch is None:
            raise _without_workers(self.name)
        return self.launch(handshakes, devices, kinds)

    @property
    def workers(self) -> Driver:
        """The driver of the workers. ClusterError where the cluster has none."""
        if self.driver is None:
            raise _without_workers(self.name)
        return self.driver

    @property
    def metrics(self) -> str:
        """Counters so far, in Prometheus' format: seconds of steps, bytes, queue depth, recoveries."""
        return self.workers.metrics.text

    def close(self) -> None:
        """Ends workers, and Ray if it was started for this cluster."""
        if self.driver is not None:
            self.driver.close()
        if self.disconnect is not None:
            self.disconnect()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _without_workers(name: str) -> ClusterError:
    return ClusterError(f"{name} was read from a file or a plan: it has no workers", remedy="Cluster.ray()")
