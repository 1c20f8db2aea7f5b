"""What the workers of a pipeline hold while each task of the schedule's table runs: one rule for plan and timeline.

A stage says what it needs while one microbatch runs. Of that its parameters, optimizer state and accumulated gradients
lie there all the time (lasting), what the forward pass leaves for the backward pass as long as the microbatch is in
flight, and the rest while one of its passes runs (passing). What a backward pass adds to the accumulated gradients
takes the place of what passes, and counts where it is more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.plan import Stage
from autopar.schedule import Table
from autopar.schedule.offload import IN_TRANSFER
from autopar.schedule.table import Task
from autopar.schedule.versions import VersionMap
from autopar.schedule.without_flush import flushes


def lasting_bytes(stage: Stage) -> int:
    """Bytes a device of what lies there the whole step: the state and what microbatches add up."""
    return stage.state_bytes + stage.accumulation_bytes


def running_bytes(stage: Stage) -> int:
    """Bytes a device of a stage while one microbatch runs, without what others in flight hold."""
    return stage.memory.total - stage.memory.in_flight


def passing_bytes(stage: Stage) -> int:
    """Bytes a device that a pass needs while it runs, besides what lies there and what its microbatch holds."""
    return max(0, running_bytes(stage) - lasting_bytes(stage) - stage.activation_bytes)


def added_bytes(stage: Stage) -> int:
    """Bytes a device of what a microbatch adds to accumulated gradients, beyond what passes.

    They are there as a whole when a backward pass ends, and what else passes is given up by then. A compiler that gives
    results places of their own needs both.
    """
    return max(0, stage.accumulation_bytes - passing_bytes(stage))


def version_bytes(content: Stage, table: Table, stage: int) -> int:
    """Bytes a device of the versions of its weights that a stage has besides the newest."""
    if flushes(table.name):
        return 0
    most_versions = VersionMap(table.name, table.num_stages, table.num_microbatches).most_versions(stage)
    return (most_versions - 1) * content.memory.parameters


@dataclass(frozen=True)
class TaskMemory:
    """Bytes a device of a worker while a task runs, and after it."""

    task: Task
    during_bytes: int
    after_bytes: int


def memory_of_tasks(stages: Mapping[int, Stage], table: Table, worker: int) -> list[TaskMemory]:
    """What a worker holds along its row of a schedule's table.

    Args:
        stages: stages that count, by number; those of other workers are left out.
        table: the schedule.
        worker: its number.
    """
    stages_here = {s: stages[s] for s in table.stages_of_worker(worker) if s in stages}
    versions = {s: version_bytes(stage, table, s) for s, stage in stages_here.items()}
    flying: Counter[int] = Counter()
    put_off: Counter[int] = Counter()
    done: Counter[int] = Counter()
    accumulates = "weight" if table.splits_backward else "backward"

    def in_flight_bytes(s: int, besides: int) -> int:
        """Bytes that microbatches of a stage wait with, all but so many that run."""
        others = max(0, flying[s] - besides)
        here = min(others, 1 + IN_TRANSFER - besides) if stages_here[s].activations_offloaded else others
        return (
            here * stages_here[s].activation_bytes
            + others * stages_here[s].received_bytes
            + put_off[s] * stages_here[s].weight_stash_bytes
        )

    def between(without: int | None = None) -> int:
        return sum(
            lasting_bytes(stages_here[t]) + versions[t] + in_flight_bytes(t, 0) for t in stages_here if t != without
        )

    tasks = []
    for task in table.rows[worker]:
        s = task.stage
        if s not in stages_here:
            continue
        # A microbatch in slices counts as a whole from its first slice on.
        first = task.slice == 0
        flying[s] += task.kind == "forward" and first
        put_off[s] -= task.kind == "weight" and first  # of the one that runs it is among what passes
        added = added_bytes(stages_here[s]) if task.kind == accumulates and done[s] else 0
        during = running_bytes(stages_here[s]) + versions[s] + in_flight_bytes(s, 1) + added + between(s)
        done[s] += task.kind == accumulates
        flying[s] -= task.kind == accumulates and first
        put_off[s] += task.kind == "backward" and table.splits_backward and first
        tasks.append(TaskMemory(task, during, between()))
    return tasks
