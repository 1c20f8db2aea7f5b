"""Memory of a pipeline's workers, from the plans of their stages and the table of the schedule.

What they hold along the schedule is counted by `autopar.simulate.memory`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from autopar.plan import PlanContent, Stage
from autopar.schedule import Table
from autopar.search.source import Sliced
from autopar.simulate.memory import added_bytes, memory_of_tasks, passing_bytes
from autopar.stages.parts import StageValue


def received_bytes(sliced: Sliced, stage: int, devices: int) -> int:
    """Bytes a device that a stage was sent by earlier ones for one microbatch, split over all its devices."""
    types = sliced.graphs[stage].types
    received = sum(
        types[str(StageValue("from", r.name))].nbytes
        for r in sliced.parts[stage].received
        if not r.backward and r.source < stage
    )
    return math.ceil(received / devices)


def worker_bytes(parts: Sequence[PlanContent], sliced: Sliced, table: Table, worker: int) -> int:
    """Most bytes a device of a worker over a step.

    Args:
        parts: the plan of each stage.
        sliced: the stages.
        table: the schedule.
        worker: its number.
    """
    return max((t.during_bytes for t in memory_of_tasks(_stages(parts, sliced), table, worker)), default=0)


def with_in_flight(stages: Sequence[Stage], parts: Sequence[PlanContent], sliced: Sliced, table: Table) -> list[Stage]:
    """``stages`` whose memory says what is there besides the microbatch that runs: the most of them is `most_bytes`."""
    running: Counter[int] = Counter()
    known = _stages(parts, sliced)
    for worker in range(table.num_workers):
        for t in memory_of_tasks(known, table, worker):
            running[t.task.stage] = max(running[t.task.stage], t.during_bytes)
    return [
        msgspec.structs.replace(
            stage,
            memory=msgspec.structs.replace(stage.memory, in_flight=max(0, running[s] - stage.memory.total)),
            received_bytes=known[s].received_bytes,
        )
        for s, stage in enumerate(stages)
    ]


def stage_bytes(content: PlanContent, sliced: Sliced, table: Table, stage: int) -> int:
    """Most bytes a device that a stage needs over a step, without other stages of its worker.

    Args:
        content: the plan of the stage.
        sliced: the stages.
        table: the schedule.
        stage: its number.
    """
    alone = {stage: _with_received(content, sliced, stage)}
    tasks = [t for w in table.workers_of_stage(stage) for t in memory_of_tasks(alone, table, w)]
    return max((t.during_bytes for t in tasks), default=0)


def _stages(parts: Sequence[PlanContent], sliced: Sliced) -> dict[int, Stage]:
    return {s: _with_received(content, sliced, s) for s, content in enumerate(parts)}


def _with_received(content: PlanContent, sliced: Sliced, stage: int) -> Stage:
    planned = content.stages[0]
    return msgspec.structs.replace(planned, received_bytes=received_bytes(sliced, stage, len(planned.devices)))


def most_bytes(parts: Sequence[PlanContent], sliced: Sliced, table: Table) -> int:
    """Most bytes a device of any worker."""
    return max(worker_bytes(parts, sliced, table, w) for w in range(table.num_workers))


def limit_of_each(parts: Sequence[PlanContent], table: Table, limit: int) -> int:
    """Bytes a device within which each stage has to stay for those of a worker to fit ``limit``.

    With n stages of l lasting bytes each, of which one runs at a time and passes through p bytes, n l + p = limit, and
    a stage alone needs l + p = (limit + (n - 1) p) / n.

    Args:
        parts: a plan of each stage, which says what it passes through.
        table: the schedule.
        limit: of a device.
    """
    most = max(len(table.stages_of_worker(w)) for w in range(table.num_workers))
    passing = min(passing_bytes(c.stages[0]) + added_bytes(c.stages[0]) for c in parts)
    return (limit + (most - 1) * passing) // most
