"""Placement groups: what Ray sets aside for all workers of a pipeline at once, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.errors import ClusterError
from autopar.runtime.ray.cluster import Slot


class Placement:
    """Room for workers.

    Args:
        slots: of each worker.
        machines: how many machines there are: workers are on machines of their own where there are as many.
        timeout_s: seconds to wait for room.

    Raises:
        ClusterError: there is not enough room.
    """

    def __init__(self, slots: Sequence[Slot], machines: int, timeout_s: float) -> None:
        strategy = "STRICT_SPREAD" if len(slots) <= machines else "PACK"
        self._group: Any = placement_group([dict(s.bundle) for s in slots], strategy=strategy)
        if not self._group.wait(timeout_s):
            self.close()
            raise ClusterError(
                f"Ray has no room for {len(slots)} workers within {timeout_s:g} s",
                cause="machines were lost, or others use them",
                remedy="ask for fewer workers, or look at `ray status`",
            )

    def options(self, worker: int, slot: Slot) -> dict[str, Any]:
        """Arguments of ``actor.options`` of a worker.

        Args:
            worker: its number.
            slot: its slot.
        """
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=worker)
        return {**slot.resources, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Gives the room back; what runs there ends."""
        if ray.is_initialized():
            remove_placement_group(self._group)
