"""What the workers of a pipeline hold, from the plans of their stages and the table of the schedule.

A stage's plan says what it needs while one microbatch runs. Of that its parameters, optimizer state and accumulated
gradients lie there all the time (lasting), what the forward pass leaves for the backward pass as long as the microbatch
is in flight (held), and the rest while one of its passes runs (passing). What a backward pass adds to the accumulated
gradients takes the place of what passes, and counts where it is more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from autopar.plan import PlanContent, Stage
from autopar.schedule import Table
from autopar.schedule.offload import IN_TRANSFER
from autopar.search.source import Sliced


def lasting_bytes(stage: Stage) -> int:
    """Bytes a device of what lies there the whole step: the state and what microbatches add up."""
    return stage.state_bytes + stage.accumulation_bytes


def passing_bytes(stage: Stage) -> int:
    """Bytes a device that a pass needs while it runs, besides what lies there and what its microbatch holds."""
    return max(0, stage.memory.total - lasting_bytes(stage) - stage.activation_bytes)


def added_bytes(stage: Stage) -> int:
    """Bytes a device of what a microbatch adds to accumulated gradients, beyond what passes.

    They are there as a whole when a backward pass ends, and what else passes is given up by then. A compiler that gives
    results places of their own needs both.
    """
    return max(0, stage.accumulation_bytes - passing_bytes(stage))


def received_bytes(sliced: Sliced, stage: int, devices: int) -> int:
    """Bytes a device that a stage was sent by earlier ones for one microbatch, split over all its devices."""
    types = sliced.graphs[stage].types
    received = sum(
        types[f"from/{r.name}"].nbytes for r in sliced.parts[stage].received if not r.backward and r.source < stage
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
    own = {s: parts[s].stages[0] for s in table.stages_of_worker(worker)}
    return max(_most(own, sliced, table, worker).values(), default=0)


def with_in_flight(stages: Sequence[Stage], parts: Sequence[PlanContent], sliced: Sliced, table: Table) -> list[Stage]:
    """``stages`` whose memory says what is there besides the microbatch that runs: the most of them is `most_bytes`."""
    running: Counter[int] = Counter()
    for worker in range(table.num_workers):
        own = {s: parts[s].stages[0] for s in table.stages_of_worker(worker)}
        for s, most in _most(own, sliced, table, worker).items():
            running[s] = max(running[s], most)
    return [
        msgspec.structs.replace(
            stage, memory=msgspec.structs.replace(stage.memory, in_flight=max(0, running[s] - stage.memory.total))
        )
        for s, stage in enumerate(stages)
    ]


def stage_bytes(content: PlanContent, sliced: Sliced, table: Table, stage: int) -> int:
    """Most bytes a device that a stage alone needs over a step; arguments as of `worker_bytes`."""
    alone = {stage: content.stages[0]}
    return max(_most(alone, sliced, table, w).get(stage, 0) for w in table.workers_of_stage(stage))


def _most(own: Mapping[int, Stage], sliced: Sliced, table: Table, worker: int) -> dict[int, int]:
    """Most bytes a device of a worker with some stages, while each of them runs."""
    sent = {s: received_bytes(sliced, s, len(stage.devices)) for s, stage in own.items()}
    flying: Counter[int] = Counter()
    put_off: Counter[int] = Counter()
    done: Counter[int] = Counter()
    accumulates = "weight" if table.splits_backward else "backward"

    def waiting(s: int, besides: int) -> int:
        """Bytes that microbatches of a stage wait with, all but so many that run."""
        others = max(0, flying[s] - besides)
        here = min(others, 1 + IN_TRANSFER - besides) if own[s].activations_offloaded else others
        return here * own[s].activation_bytes + others * sent[s] + put_off[s] * own[s].weight_stash_bytes

    most: Counter[int] = Counter()
    for task in table.rows[worker]:
        s = task.stage
        if s not in own:
            continue
        flying[s] += task.kind == "forward"
        put_off[s] -= task.kind == "weight"  # of the one that runs it is among what passes
        added = added_bytes(own[s]) if task.kind == accumulates and done[s] else 0
        beside = sum(lasting_bytes(own[t]) + waiting(t, 0) for t in own if t != s)
        most[s] = max(most[s], own[s].memory.total + waiting(s, 1) + added + beside)
        done[s] += task.kind == accumulates
        flying[s] -= task.kind == accumulates
        put_off[s] += task.kind == "backward" and table.splits_backward
    return dict(most)


def most_bytes(parts: Sequence[PlanContent], sliced: Sliced, table: Table) -> int:
    """Most bytes a device of any worker."""
    return max(worker_bytes(parts, sliced, table, w) for w in range(table.num_workers))


def limit_of_each(parts: Sequence[PlanContent], table: Table, limit: int) -> tuple[int, int]:
    """Bytes a device within which each stage has to stay for those of a worker to fit ``limit``, and their number.

    With n stages of l lasting bytes each, of which one runs at a time and passes through p bytes, n l + p = limit, and
    a stage alone needs l + p = (limit + (n - 1) p) / n.

    Args:
        parts: a plan of each stage, which says what it passes through.
        table: the schedule.
        limit: of a device.
    """
    most = max(len(table.stages_of_worker(w)) for w in range(table.num_workers))
    passing = min(passing_bytes(c.stages[0]) + added_bytes(c.stages[0]) for c in parts)
    return (limit + (most - 1) * passing) // most, most
