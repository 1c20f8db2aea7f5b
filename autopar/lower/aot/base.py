"""`Target`: a kind of devices that XLA's compiler for them can be asked about without having them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError


@dataclass(frozen=True)
class Target(ABC):
    """Devices to compile for.

    Args:
        text: how a user writes it, as ``tpu:v5p:4x4x4``.
    """

    text: str

    @property
    @abstractmethod
    def platform(self) -> str:
        """jax's name of the platform, for lowering: "cpu", "tpu" or "cuda"."""

    @property
    @abstractmethod
    def num_devices(self) -> int | None:
        """Number of its devices; None where any number will do."""

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of modules that have to be installed."""

    @property
    @abstractmethod
    def extra(self) -> str:
        """The extra of autopar that installs them; "" where none is needed."""

    @abstractmethod
    def cluster(self) -> Cluster:
        """The cluster of autopar that these devices are, to plan for."""

    @abstractmethod
    def environment(self, num_devices: int) -> dict[str, str]:
        """Variables of the process that compiles.

        Args:
            num_devices: how many devices the plan has.
        """

    @abstractmethod
    def device_grid(self, shape: tuple[int, ...]) -> Any:
        """The devices as a numpy array of ``shape``, in that process: those of the last axis the nearest."""

    def part_grid(self, shape: tuple[int, ...], indices: Sequence[int]) -> Any:
        """Some of the devices as a numpy array of ``shape``.

        Args:
            shape: sizes of a stage's mesh axes.
            indices: numbers of its devices in the order of `cluster`, in mesh order.
        """
        every = self.device_grid((self.num_devices or max(indices) + 1,))
        return every[list(indices)].reshape(shape)

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """Options of XLA beyond those of a run of the program."""
        return {}

    @property
    def clock_hz(self) -> float | None:
        """Clock of the cores whose cycles the compiler estimates; None where it estimates none."""
        return None

    def check_installed(self) -> None:
        """Raises AutoparError where a module is missing; it has the command that installs it."""
        missing = [name for name in ("flatbuffers", *self.needs) if not _found(name)]
        if missing:
            wanted = f"autopar[{self.extra}]" if self.extra else "autopar"
            raise AutoparError(
                f"compiling for {self.text} needs {', '.join(missing)}, which this Python does not have",
                cause=f"the compiler for {self.platform} comes in packages of its own"
                if self.extra
                else "autopar's own dependencies are not all installed",
                remedy=f"pip install '{wanted}'",
            )


def resized(cluster: Cluster, num_devices: int, devices_per_node: int | None = None) -> Cluster:
    """A cluster of one group with another number of devices.

    Args:
        cluster: where the devices are from.
        num_devices: how many; a multiple of ``devices_per_node``.
        devices_per_node: of each node; None takes the cluster's own where it divides, else one node.
    """
    (group,) = cluster.groups
    node_devices = group.devices_per_node
    each = devices_per_node or (node_devices if num_devices % node_devices == 0 else num_devices)
    return Cluster(cluster.name, (dataclasses.replace(group, count=num_devices // each, devices_per_node=each),))


def _found(module: str) -> bool:
    """Whether a module can be imported; packages above it that are missing mean that it cannot."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
