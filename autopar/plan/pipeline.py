"""The pipeline of a plan as plain data: schedule table, works, values, transfers."""

from __future__ import annotations

from typing import Literal as OneOf

from autopar.plan.record import Record

#: "before" runs once a stage before the first microbatch, "update" once after the last, "meeting" once between all
#: forward and all backward passes; the others once a microbatch.
WorkKind = OneOf["before", "forward", "meeting", "backward", "weight", "update"]
Lifetime = OneOf["step", "microbatch", "accumulator"]
Reduce = OneOf["sum", "max", "min", "concatenate"]
#: How several processes carry a pipeline out.
Execution = OneOf["lists", "one_program"]


class PipelineWork(Record, frozen=True):
    """A program of a stage: what it reads and writes, and how long it takes once.

    Args:
        kind: forward, backward and weight run once a microbatch, before, meeting and update once a step.
        stage: the stage.
        seconds: predicted seconds of one run.
        part: counts up inside before, meeting and update where values cross stages.
        reads: names of values.
        writes: names of values.
        accumulates: names of accumulators that each run contributes to.
        aliases: (read, write) that share a buffer.
        temporaries_bytes: bytes a device besides what it reads and writes.
    """

    kind: WorkKind
    stage: int
    seconds: float
    part: int = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    accumulates: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    temporaries_bytes: int = 0


class PipelineValue(Record, frozen=True):
    """A value that works pass on.

    Args:
        name: its name.
        bytes: bytes a device of one buffer.
        lifetime: one buffer a step, one a microbatch, or contributions of all microbatches joined.
        reduce: how contributions are joined.
        stages: stages where an input lies when the step begins.
        donated: whether an input's buffer may be reused.
        result: whether the caller gets it.
        host: whether it waits in host memory for the backward pass of its microbatch.
        host_seconds: predicted seconds of moving one buffer there, or back.
    """

    name: str
    bytes: int
    lifetime: Lifetime
    reduce: Reduce | None = None
    stages: tuple[int, ...] = ()
    donated: bool = False
    result: bool = False
    host: bool = False
    host_seconds: float = 0.0


class PipelineTransfer(Record, frozen=True):
    """Predicted seconds of sending one buffer of ``value`` from a worker to another."""

    value: str
    source: int
    target: int
    seconds: float


class ExecutionPrice(Record, frozen=True):
    """Predicted price of a step by one way of carrying a pipeline out.

    Args:
        step_s: seconds, with those of starting programs.
        memory_bytes: on the fullest device.
    """

    step_s: float
    memory_bytes: int


class ExecutionPrices(Record, frozen=True):
    """Prices of both ways in which several processes carry a pipeline out, and the one that "auto" takes.

    Args:
        lists: every process runs the instruction lists of its workers.
        one_program: one XLA program on all devices.
        rounds: of that program.
        permutes: that join all workers in it.
        taken: the one that "auto" takes.
        reason: decides it.
    """

    lists: ExecutionPrice
    one_program: ExecutionPrice
    rounds: int
    permutes: int
    taken: Execution = "lists"
    reason: str = ""


class Pipeline(Record, frozen=True):
    """The pipeline of a plan with several stages, as the simulator needs it.

    Args:
        table: the schedule table as text, as `autopar.schedule.to_text` writes it.
        works: all programs of all stages.
        values: all that they name.
        transfers: those that take time; others take none.
        members: by stage the ids of its operators of the forward pass where stages are a graph; empty where they are
            runs, which the plan's ``cuts`` tell.
        slice_lengths: tokens of each slice of a microbatch; empty where it is whole.
        executions: prices of both ways of carrying it out in several processes; None where there is one way.
    """

    table: str
    works: tuple[PipelineWork, ...]
    values: tuple[PipelineValue, ...]
    transfers: tuple[PipelineTransfer, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()
    slice_lengths: tuple[int, ...] = ()
    executions: ExecutionPrices | None = None
