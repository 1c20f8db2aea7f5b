"""Lower bound of a pipeline from its planned stages: no other stage makes it faster.

The worker of stage i computes m microbatches and the update, after the first microbatch has passed the stages before:

    T >= sum over j < i of forward_j / m + forward_i + backward_i + update_i

by every schedule that gives a stage one worker, with what a stage takes in a step on its devices. A stage whose plan a
memory limit had a part in bounds nothing: under another schedule the limit may be another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.plan import PlanContent
from autopar.search.outcome import Bounded

#: A stage: the fingerprint of its graph, its devices, the number of microbatches.
_Key = tuple[str, str, int]


@dataclass
class BusyStages:
    """Seconds a step of the stages that were planned, for candidates that have them in common.

    Args:
        seconds: by stage those of a microbatch's forward pass and of all that its worker does in a step.
    """

    seconds: dict[_Key, tuple[float, float]] = field(default_factory=dict)

    def key(self, graph: Graph, part: Cluster, count: int) -> _Key:
        """Key of a stage.

        Args:
            graph: of the stage.
            part: its devices.
            count: microbatches.
        """
        return fingerprint(graph), part.to_json(), count

    def add(self, key: _Key, content: PlanContent) -> None:
        """Keeps what the plan of a stage takes, unless a memory limit had a part in it."""
        times = dict(content.stages[0].work_times)
        if times and not content.memory_bound:
            forward_s = times.get("forward", 0.0)
            busy_s = forward_s + times.get("backward", 0.0) + times.get("meeting", 0.0) + times.get("update", 0.0)
            self.seconds[key] = forward_s / key[2], busy_s

    def least_s(self, keys: Mapping[int, _Key]) -> float:
        """Seconds that a pipeline takes at least; 0.0 where none of its stages was planned.

        Args:
            keys: of its stages, by number.
        """
        return max(self._bounds(keys), default=0.0)

    def _bounds(self, keys: Mapping[int, _Key]) -> Iterator[float]:
        before_s = 0.0
        for stage in sorted(keys):
            forward_s, busy_s = self.seconds.get(keys[stage], (0.0, 0.0))
            yield before_s + busy_s
            before_s += forward_s

    def closed(self, keys: Mapping[int, _Key], cutoff_s: float) -> Bounded | None:
        """Message that a pipeline takes ``cutoff_s`` or more; None where it may take less."""
        least_s = self.least_s(keys)
        return Bounded("what its stages that are planned take", least_s) if least_s >= cutoff_s else None


def least_of_looks_s(contents: Mapping[int, PlanContent], first: Sequence[int], count: int, left: float) -> float:
    """Seconds of a pipeline whose stages take as long as those of their kinds that are planned: an estimate, no bound.

    The slowest stage does all its work and waits for a share of one microbatch of every other, which weight gradients
    do not fill.

    Args:
        contents: plans of stages, by their number.
        first: for each stage the first that it is isomorphic to.
        count: microbatches.
        left: the share.
    """
    by_kind = {first[i]: dict(content.stages[0].work_times) for i, content in contents.items()}
    loops_s, busy_s = list[float](), list[float]()
    for kind in first:
        times = by_kind.get(kind, {})
        loops_s.append(times.get("forward", 0.0) + times.get("backward", 0.0))
        busy_s.append(loops_s[-1] + times.get("meeting", 0.0) + times.get("update", 0.0))
    total_s = sum(loops_s)
    return max(busy + left / count * (total_s - loop) for busy, loop in zip(busy_s, loops_s, strict=True))
