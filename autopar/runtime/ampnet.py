"""AMPNet on this process's devices: a thread for each stage, which takes what has arrived, backward passes first.

The order that happened is a `Table`. What a stage computes depends on the order of its own passes alone (keys do not
overtake each other), so that the table, replayed by one thread, gives the same numbers to the bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar._compat.context import entered, trace_context
from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.lower.pipeline.ampnet import AmpPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.amp_stage import AmpStage, choice, deliver, may_begin
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.local_pipeline import PipelineProgram, load_pipeline
from autopar.runtime.ordered import OrderedCalls, check_order
from autopar.runtime.without_flush import UnflushedProgram, outputs_of_updates
from autopar.schedule import Buffer, Table, Task
from autopar.schedule.ampnet import AmpFlow
from autopar.schedule.memory import WorkerMemory


@dataclass(frozen=True, eq=False)
class AmpProgram(UnflushedProgram[PipelineProgram], OrderedCalls):
    """AMPNet, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        pipeline: its programs, and where inputs and outputs lie.
        flow: what it carries out.
        last: the order of the last call.
    """

    flow: AmpFlow
    last: deque[Table] = field(default_factory=lambda: deque(maxlen=1))

    @property
    def orders(self) -> Sequence[Table]:
        """See `OrderedCalls.orders`."""
        return tuple(self.last)

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker, in the order of the schedule's table."""
        return self.pipeline.worker_memory

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device of the worker that needs most, in the order of the schedule's table."""
        return self.pipeline.footprint_bytes

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        return self.pipeline.match(leaves)

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a call in threads; see `autopar.runtime.loaded.LoadedProgram`."""
        with LAUNCHES:
            stages = self._stages(placed)
            _Threads(self.flow, stages).run()
            self.last.append(self._order(stages))
            return self._results(stages)

    def replay(self, placed: Sequence[Any], order: Table) -> Sequence[Any]:
        """See `OrderedCalls.replay`; one thread runs it."""
        flow = self.flow
        check_order(order, flow.stages, flow.microbatches)
        with LAUNCHES:
            stages = self._stages(placed)
            _follow(flow, stages, order)
            return self._results(stages)

    def _order(self, stages: Sequence[AmpStage]) -> Table:
        name = self.pipeline.lowered.table.name
        return Table(name, self.flow.stages, self.flow.microbatches, tuple(tuple(s.passes) for s in stages))

    def _stages(self, placed: Sequence[Any]) -> list[AmpStage]:
        pipeline, flow = self.pipeline, self.flow
        inputs = pipeline.by_name([*placed, *pipeline.constants])
        start: dict[tuple[int, Buffer], Any] = {}
        for value in flow.dataflow.values:
            if value.is_input and value.ref is not None:
                if value.ref.kind == "in":
                    for s in value.stages:
                        start[s, Buffer(value.name)] = pipeline.put(s, value.name, inputs[value.ref.name])
                else:
                    pipeline.put_microbatches(start, value, value.ref.name, inputs[value.ref.name])
        workers = pipeline.runtime.workers(start)
        return [AmpStage(s, flow, worker) for s, worker in enumerate(workers)]

    def _results(self, stages: Sequence[AmpStage]) -> list[Any]:
        for stage in stages:
            stage.finish()
        flow = self.flow
        outputs = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: stages[s].worker.arrays[b])
        return self.pipeline.joined(outputs)


def _follow(flow: AmpFlow, stages: Sequence[AmpStage], order: Table) -> None:
    """Passes in the order of a table, by one thread."""
    rows = [deque(row) for row in order.rows]
    while any(rows):
        moved = False
        for stage, row in zip(stages, rows, strict=True):
            while row and _is_next(flow, stages, stage, row[0]):
                kind = row.popleft().kind
                deliver(stages, stage.run(kind))
                stage.count(kind)
                moved = True
        if not moved:
            raise ScheduleError(f"the order cannot be: {[str(row[0]) for row in rows if row]} have to wait for ever")


def _is_next(flow: AmpFlow, stages: Sequence[AmpStage], stage: AmpStage, task: Task) -> bool:
    if task.kind == "forward":
        there = task.microbatch == stage.begun and may_begin(flow, stages, stage)
    else:
        there = task.microbatch == stage.done
    return there and task.stage == stage.number and stage.has(task.kind)


class _Threads:
    """A thread for each stage.

    Args:
        flow: what they carry out.
        stages: what each of them does and has.
    """

    def __init__(self, flow: AmpFlow, stages: Sequence[AmpStage]) -> None:
        self.flow, self.stages = flow, stages
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.context = trace_context()

    def run(self) -> None:
        """Until every key is through; raises the first error of a thread."""
        threads = [threading.Thread(target=self._work, args=(s,), daemon=True) for s in self.stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _work(self, stage: AmpStage) -> None:
        try:
            with entered(self.context):  # a thread begins with jax's defaults
                while stage.done < self.flow.microbatches:
                    if not self._pass(stage):
                        return
        except BaseException as error:  # the caller's thread raises it
            with self.changed:
                self.errors.append(error)
                self.changed.notify_all()

    def _pass(self, stage: AmpStage) -> bool:
        """The next pass of a stage; False where another thread failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.errors or choice(self.flow, self.stages, stage))
            kind = choice(self.flow, self.stages, stage)
        if self.errors or kind is None:
            return False
        sent = stage.run(kind)
        with self.changed:
            deliver(self.stages, sent)
            stage.count(kind)
            self.changed.notify_all()
        return True


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
    return AmpProgram(load_pipeline(traced, split_step, amp.pipeline, devices, spared=everything), amp.flow)
