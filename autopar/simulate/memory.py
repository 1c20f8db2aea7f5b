"""Memory of a pipeline's workers at each task of the schedule's table: one rule for plan and timeline.

A stage says what it needs while one microbatch runs. Of that its parameters, optimizer state and accumulated gradients
lie there all the time (lasting), what the forward pass leaves for the backward pass as long as the microbatch is in
flight, and the rest while one of its passes runs (passing). What a backward pass adds to the accumulated gradients
takes the place of what passes, and counts where it is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.plan import Stage
from autopar.schedule import Table
from autopar.schedule.offload import IN_TRANSFER
from autopar.schedule.table import Task
from autopar.schedule.without_flush.schedules import VersionMap, flushes


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
    """Memory of a worker along its row of a schedule's table.

    Args:
        stages: stages that count, by number; those of other workers are left out.
        table: the schedule.
        worker: its number.
    """
    here = {
        s: _held_by(stages[s], version_bytes(stages[s], table, s))
        for s in table.stages_of_worker(worker)
        if s in stages
    }
    accumulates = "weight" if table.splits_backward else "backward"
    lasting = sum(held.lasting_bytes for held in here.values())
    tasks = []
    for task in table.rows[worker]:
        held = here.get(task.stage)
        if held is None:
            continue
        # A microbatch in slices counts as a whole from its first slice on.
        first, ends = task.slice == 0, task.kind == accumulates
        held.flying += task.kind == "forward" and first
        held.put_off -= task.kind == "weight" and first  # of the one that runs it is among what passes
        added = held.added_bytes if ends and held.done else 0
        during = held.running_bytes + held.in_flight_bytes(1) + added + lasting - held.lasting_bytes
        if len(here) > 1:
            during += sum(other.in_flight_bytes(0) for other in here.values() if other is not held)
        held.done += ends
        held.flying -= ends and first
        held.put_off += task.kind == "backward" and table.splits_backward and first
        after = lasting + sum(other.in_flight_bytes(0) for other in here.values())
        tasks.append(TaskMemory(task, during, after))
    return tasks


@dataclass(eq=False)
class _Held:
    """Memory of a stage at a task of its worker's row.

    Args:
        lasting_bytes, running_bytes, added_bytes: as of the functions above, with versions of weights.
        activation_bytes, received_bytes, stash_bytes: of a microbatch.
        most_here: microbatches besides those that run whose activations are on the device; None for all.
        flying, put_off, done: microbatches that are in flight, that wait for their weight gradients, that are done.
    """

    lasting_bytes: int
    running_bytes: int
    added_bytes: int
    activation_bytes: int
    received_bytes: int
    stash_bytes: int
    most_here: int | None
    flying: int = 0
    put_off: int = 0
    done: int = 0

    def in_flight_bytes(self, besides: int) -> int:
        """Bytes that microbatches wait with, all but so many that run."""
        others = max(0, self.flying - besides)
        here = others if self.most_here is None else min(others, self.most_here - besides)
        return here * self.activation_bytes + others * self.received_bytes + self.put_off * self.stash_bytes


def _held_by(stage: Stage, versions: int) -> _Held:
    """Memory of a stage with so many bytes of older weights before a step."""
    return _Held(
        lasting_bytes(stage) + versions,
        running_bytes(stage) + versions,
        added_bytes(stage),
        stage.activation_bytes,
        stage.received_bytes,
        stage.weight_stash_bytes,
        1 + IN_TRANSFER if stage.form.activations_offloaded else None,
    )
