"""AMPNet: stages that take what has arrived, in threads of this process or on workers.

`AmpProgram` is the loaded step, wherever its stages are; `load_ampnet` makes the one of this process, and
`autopar.runtime.ray.ampnet.load_remote_ampnet` that of workers. `autopar.runtime.amp_stage` runs a stage.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autopar._compat.context import entered, trace_context
from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.lower.pipeline.stale import AmpPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.amp_stage import KINDS, LETTERS, AmpStage, run_stage
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.local_pipeline import PipelineProgram, load_pipeline
from autopar.runtime.transport.queues import WorkerQueues
from autopar.runtime.without_flush import OverAnother, outputs_of_updates
from autopar.schedule import Buffer, Kind, Table, Task
from autopar.schedule.ampnet import AmpFlow

#: (the pipeline, flow, inputs as `place_all` made them, order of each stage or nothing) -> results, orders that were.
Carry: TypeAlias = Callable[[Any, AmpFlow, Sequence[Any], tuple[str, ...]], tuple[Sequence[Any], tuple[str, ...]]]


@dataclass(frozen=True, eq=False)
class AmpProgram(OverAnother):
    """AMPNet, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        name: of the schedule.
        flow: what it carries out.
        carry_out: runs a call.
        last: the order of the last call.
    """

    name: str
    flow: AmpFlow
    carry_out: Carry
    last: deque[Table] = field(default_factory=lambda: deque(maxlen=1))

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a call; see `autopar.runtime.loaded.LoadedProgram`."""
        results, orders = self.carry_out(self.under, self.flow, placed, ())
        rows = tuple(_row(stage, order) for stage, order in enumerate(orders))
        self.last.append(Table(self.name, self.flow.stages, self.flow.microbatches, rows))
        return results

    def replay(self, placed: Sequence[Any], order: Table) -> Sequence[Any]:
        """Runs a call in an order that happened: the same numbers to the bit.

        Args:
            placed: inputs as `place_all` made them.
            order: of an earlier call.

        Raises:
            ScheduleError: the order is of other numbers, or cannot be.
        """
        check_order(self.flow, order)
        orders = tuple("".join(LETTERS[task.kind] for task in row) for row in order.rows)
        return self.carry_out(self.under, self.flow, placed, orders)[0]


def _row(stage: int, order: str) -> tuple[Task, ...]:
    count = dict.fromkeys(KINDS, 0)
    row = []
    for letter in order:
        row.append(Task(KINDS[letter], stage, count[letter]))
        count[letter] += 1
    return tuple(row)


def check_order(flow: AmpFlow, order: Table) -> None:
    """Raises ScheduleError where stages cannot have passes in an order, or it is of other numbers."""
    stages, microbatches = flow.stages, flow.microbatches
    if (order.num_stages, order.num_microbatches) != (stages, microbatches):
        raise ScheduleError(
            f"the order is of {order.num_stages} stages and {order.num_microbatches} microbatches; the step has "
            f"{stages} and {microbatches}"
        )
    rows, written = [deque(row) for row in order.rows], set[Buffer]()
    passes: list[dict[Kind, int]] = [dict.fromkeys(LETTERS, 0) for _ in rows]
    moved = True
    while moved:
        moved = False
        for stage, (row, count) in enumerate(zip(rows, passes, strict=True)):
            while row and _may_follow(flow, stage, row[0], count, written):
                task = row.popleft()
                count[task.kind] += 1
                spec = flow.spec(task.kind, stage)
                written |= {Buffer(n, task.microbatch) for n in (() if spec is None else spec.writes)}
                moved = True
    if blocked := [str(row[0]) for row in rows if row]:
        raise ScheduleError(f"the order cannot be: {blocked} have to wait for ever")


def _may_follow(flow: AmpFlow, stage: int, task: Task, count: dict[Kind, int], written: set[Buffer]) -> bool:
    """Whether ``task`` may be the next of a stage after ``count`` passes, once others have ``written`` buffers."""
    begun, done = count["forward"], count["backward"]
    if task.kind == "forward":
        is_next = task.microbatch == begun and begun < done + flow.most_active
    else:
        is_next = task.microbatch == done < begun
    return is_next and all(Buffer(n, task.microbatch) in written for n in flow.received(task.kind, stage))


def _in_threads(
    pipeline: PipelineProgram, flow: AmpFlow, placed: Sequence[Any], orders: tuple[str, ...]
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """Runs a call with a thread for each stage; raises the first error of a thread."""
    queues, context = WorkerQueues(), trace_context()
    done: dict[int, str] = {}
    errors: list[BaseException] = []

    def work(stage: AmpStage) -> None:
        try:
            with entered(context):  # a thread begins with jax's defaults
                order = orders[stage.number] if orders else ""
                done[stage.number] = run_stage(stage, queues.link(stage.number), lambda _: None, order)
        except BaseException as error:  # the caller's thread raises it
            errors.append(error)
            queues.give_up()

    with LAUNCHES:
        workers = pipeline.runtime.workers(_start(pipeline, flow, placed))
        stages = [AmpStage(s, flow, worker) for s, worker in enumerate(workers)]
        threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    outputs = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: workers[s].arrays[b])
    return pipeline.joined(outputs), tuple(done[s] for s in sorted(done))


def _start(pipeline: PipelineProgram, flow: AmpFlow, placed: Sequence[Any]) -> dict[tuple[int, Buffer], Any]:
    inputs = pipeline.by_name([*placed, *pipeline.constants])
    start: dict[tuple[int, Buffer], Any] = {}
    for value in flow.dataflow.values:
        if value.is_input and value.ref is not None:
            if value.ref.kind == "in":
                for s in value.stages:
                    start[s, Buffer(value.name)] = pipeline.put(s, value.name, inputs[value.ref.name])
            else:
                pipeline.put_microbatches(start, value, value.ref.name, inputs[value.ref.name])
    return start


def load_ampnet(traced: Traced, split_step: SplitStep, amp: AmpPipeline, devices: Sequence[Any]) -> AmpProgram:
    """Compiles AMPNet for this process's devices; other arguments and errors as of `load_pipeline`.

    Raises:
        ScheduleError: the devices are those of several processes.
    """
    processes = len({d.process_index for d in devices})
    if processes > 1:
        raise ScheduleError(
            f"AMPNet has no order that {processes} processes could follow",
            cause="its stages take what arrives, and programs of several processes have to start in one order",
            remedy="schedule='pipedream', one process for all devices, or workers of Cluster.ray over sockets",
        )
    everything = frozenset(v.name for v in amp.flow.dataflow.values)  # what is under way is not written over
    pipeline = load_pipeline(traced, split_step, amp.pipeline, devices, spared=everything)
    return AmpProgram(pipeline, amp.pipeline.table.name, amp.flow, _in_threads)
