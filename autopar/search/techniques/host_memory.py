"""Uses of host memory that the planner may choose: state that hosts update, and activations of microbatches in flight.

State that devices update, and what enters segments, has its place chosen with the sharding: see
`autopar.search.intra.host`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedule.offload import IN_TRANSFER
from autopar.search.techniques.base import Asked, Switch


@dataclass(frozen=True)
class HostUpdate(Switch):
    """Updates by hosts, of state that only the update reads."""

    field: str = "host_update"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if asked.named:
            return "a strategy names the plan"
        offload = asked.problem.job.offload
        return _without_hosts(asked) if offload == "auto" else f"offload={offload!r} says where state lies"


@dataclass(frozen=True)
class ActivationsOnHost(Switch):
    """Activations of microbatches in flight in host memory, in stages where so many are in flight that it helps."""

    field: str = "activations_offloaded"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if asked.problem.job.offload == "none":
            return "offload='none' keeps activations on devices"
        if asked.in_flight - 1 <= IN_TRANSFER:
            return "no more microbatches are in flight than move between devices and hosts"
        return _without_hosts(asked)


HOST_UPDATE, ACTIVATIONS_ON_HOST = HostUpdate(), ActivationsOnHost()


def _without_hosts(asked: Asked) -> str:
    groups = asked.problem.cluster.groups
    return "the cluster gives no host_bandwidth" if any(g.host_bandwidth is None for g in groups) else ""
