"""Lower bound of a pipeline from its planned stages: no other stage makes it faster.

The worker of stage i computes m microbatches and the update, after the first microbatch has passed the stages before:

    T >= sum over j < i of forward_j / m + forward_i + backward_i + update_i

by every schedule that gives a stage one worker, with what a stage takes in a step on its devices. A stage whose plan a
memory limit had a part in bounds nothing: under another schedule the limit may be another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.plan import PlanContent
from autopar.search.outcome import Bounded
from autopar.search.store import Key, Store


def keep_busy(store: Store, key: Key, content: PlanContent) -> None:
    """Keeps what the plan of a stage takes, unless a memory limit had a part in it."""
    times = dict(content.stages[0].work_times)
    if times and not content.memory_bound:
        forward_s = times.get("forward", 0.0)
        busy_s = forward_s + times.get("backward", 0.0) + times.get("meeting", 0.0) + times.get("update", 0.0)
        store.once(key, lambda: (forward_s / content.num_microbatches, busy_s))


def least_busy_s(store: Store, keys: Mapping[int, Key]) -> float:
    """Seconds that a pipeline takes at least; 0.0 where none of its stages was planned.

    Args:
        store: has what stages take.
        keys: of its stages, by number.
    """
    return max(_bounds(store, keys), default=0.0)


def _bounds(store: Store, keys: Mapping[int, Key]) -> Iterator[float]:
    before_s = 0.0
    for stage in sorted(keys):
        forward_s, busy_s = store.get(keys[stage], (0.0, 0.0))
        yield before_s + busy_s
        before_s += forward_s


def closed_by_busy(store: Store, keys: Mapping[int, Key], cutoff_s: float) -> Bounded | None:
    """Message that a pipeline takes ``cutoff_s`` or more by its planned stages; None where it may take less."""
    least_s = least_busy_s(store, keys)
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
