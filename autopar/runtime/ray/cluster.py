"""`RayCluster`: a cluster to plan with that is a Ray cluster to run on. Imports no ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from autopar.cluster import Cluster
from autopar.runtime.ray.crew import Crew
from autopar.runtime.ray.messages import Hello


@dataclass(frozen=True)
class Slot:
    """Room for one process with devices.

    Args:
        devices: how many it has.
        platform: jax's name of their kind.
        environment: variables of the process.
        resources: what Ray must set aside for it: arguments of ``actor.options``.
        node: Ray's id of the node; empty where any will do.
    """

    devices: int
    platform: str
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True)
class RayCluster(Cluster):
    """What `autopar.Cluster.ray` returns. Only the name and the groups are compared and written to plans.

    Args:
        name: see `Cluster`.
        groups: see `Cluster`.
        slots: room for workers, in the order of the cluster's devices.
        listen: address that workers listen on.
        launch: starts workers: (what each is told, its slot) -> the crew.
        disconnect: ends what was started for this cluster.
    """

    slots: tuple[Slot, ...] = field(default=(), compare=False, repr=False)
    listen: str = field(default="127.0.0.1", compare=False, repr=False)
    launch: Callable[[Sequence[Hello], Sequence[Slot]], Crew] | None = field(default=None, compare=False, repr=False)
    disconnect: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def close(self) -> None:
        """Ends workers, and Ray if it was started for this cluster."""
        if self.disconnect is not None:
            self.disconnect()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()
