"""AMPNet: stages that take what has arrived, in threads of this process or on workers.

`AmpProgram` is the loaded step, wherever its stages are; `load_ampnet` makes the one of this process, and
`autopar.runtime.ray.without_flush.load_remote_ampnet` that of workers.

`run_stage` carries out the call of one stage, over whatever link joins it to the others. Each stage counts its own
keys under way, which bounds how old its gradients are (see `autopar.schedule.without_flush.ampnet`). Where backward
passes go through all stages, the keys of stage 0 are those of all. Results of a stage depend on the order of its own
passes alone, since keys do not overtake each other: the same orders give the same numbers to the bit.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax

from autopar._compat.context import entered, trace_context
from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.callbacks import check_callbacks
from autopar.runtime.interpreter import Worker
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.pipeline import PipelineProgram, load_pipeline, memory_of_workers
from autopar.runtime.transport.base import ArrivalLink
from autopar.runtime.transport.queues import WorkerQueues
from autopar.runtime.without_flush import OverAnother, outputs_of_updates
from autopar.schedule import NONE, Accumulate, Apply, Buffer, Free, Kind, Run, Stash, Table, Task, WorkSpec
from autopar.schedule.without_flush.ampnet import AmpFlow
from autopar.schedule.without_flush.lists import METRICS, SHARED, STATE

#: (the pipeline, flow, inputs as `place_all` made them, order of each stage or nothing) -> results, orders that were.
Carry: TypeAlias = Callable[[Any, AmpFlow, Sequence[Any], tuple[str, ...]], tuple[Sequence[Any], tuple[str, ...]]]
#: Letters of passes in the text of an order.
LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B"}
#: Passes by their letters.
KINDS: Mapping[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


@dataclass(frozen=True, eq=False)
class AmpProgram(OverAnother):
    """A loaded pipeline with the schedule AMPNet, whose workers decide the order of passes at run time.

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
        workers = pipeline.workers(queues.link, _start(pipeline, flow, placed))
        stages = [AmpStage(s, flow, worker) for s, worker in workers.items()]
        threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        with pipeline.lowered.callbacks.explained():
            raise errors[0]
    outputs = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: workers[s].arrays[b])
    joined = pipeline.joined(outputs)
    check_callbacks(pipeline.lowered.callbacks, joined)
    return joined, tuple(done[s] for s in sorted(done))


def _start(pipeline: PipelineProgram, flow: AmpFlow, placed: Sequence[Any]) -> dict[tuple[int, Buffer], Any]:
    inputs = pipeline.by_name([*placed, *pipeline.constants])
    start: dict[tuple[int, Buffer], Any] = {}
    for value in flow.dataflow.values:
        if value.is_input and value.ref is not None:
            if value.ref.kind == "in":
                for s in value.stages:
                    start[s, Buffer(value.name)] = pipeline.put(s, value.name, inputs[value.ref.name])
            else:
                name = value.ref.name
                pipeline.put_microbatches(start, value.name, value.stages, name, inputs[name], set())
    return start


def load_ampnet(
    traced: Traced, split_step: SplitStep, lowered: LoweredPipeline, flow: AmpFlow, devices: Sequence[Any]
) -> AmpProgram:
    """Compiles a pipeline with the schedule AMPNet for this process's devices.

    Other arguments are those of `autopar.runtime.pipeline.load_pipeline`.

    Args:
        flow: works and values of a call.

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
    everything = frozenset(v.name for v in flow.dataflow.values)  # what is under way is not written over
    pipeline = load_pipeline(traced, split_step, lowered, devices, spared=everything, flushes=False)
    pipeline = replace(pipeline, worker_memory=memory_of_workers(lowered, pipeline.loaded))
    return AmpProgram(pipeline, lowered.table.name, flow, _in_threads)


def run_stage(stage: AmpStage, link: ArrivalLink, before: Callable[[int], None], order: str = "") -> str:
    """Runs a call of one stage.

    Args:
        stage: with its inputs.
        link: to the other stages.
        before: called with the number of passes so far before each.
        order: letters of passes in the order that they are to have; empty takes what arrives, backward passes first.

    Returns:
        The order that they had.

    Raises:
        ScheduleError: the order is of other numbers, or waits for what does not come.
        PeerLostError: a worker is gone.
        SilentPeerError: nothing came from a worker in time.
    """
    keys = stage.flow.microbatches
    numbers = {letter: order.count(letter) for letter in KINDS}
    if order and (len(order) != 2 * keys or set(numbers.values()) != {keys}):
        raise ScheduleError(f"the order has passes {numbers}; stage {stage.number} has {keys} of each")
    coming = stage.coming()
    while stage.done < keys:
        for source in coming:
            while coming[source] and link.ready(source):
                _take(stage, link, source, coming)
        kind = _next(stage, order)
        if kind is None:
            awaited = [s for s, count in coming.items() if count]
            if not awaited:
                raise ScheduleError(f"stage {stage.number} waits for ever before pass {len(stage.passes)} of {order}")
            _take(stage, link, link.wait_any(awaited), coming)
            continue
        before(len(stage.passes))
        for to, buffer, array in stage.run(kind):
            link.send(to, stage.tag(buffer), array, buffer.value)
        stage.count(kind)
    stage.finish()
    return "".join(LETTERS[task.kind] for task in stage.passes)


def _take(stage: AmpStage, link: ArrivalLink, source: int, coming: Counter[int]) -> None:
    tag = link.next_tag(source)
    buffer = stage.tagged(tag)
    stage.worker.arrays[buffer] = link.receive(source, tag, stage.worker.placements.get(buffer.value))
    coming[source] -= 1


def _next(stage: AmpStage, order: str) -> Kind | None:
    if not order:
        return choice(stage)
    kind = KINDS[order[len(stage.passes)]]
    return kind if stage.has(kind) else None


def choice(stage: AmpStage) -> Kind | None:
    """The pass that a stage takes next; None where it has to wait."""
    if stage.has("backward"):
        return "backward"
    return "forward" if stage.may_begin and stage.has("forward") else None


class AmpStage:
    """A stage during a call.

    Args:
        number: of the stage.
        flow: what is carried out.
        worker: carries instructions out; its inputs lie there.
    """

    def __init__(self, number: int, flow: AmpFlow, worker: Worker) -> None:
        self.number, self.flow, self.worker = number, flow, worker
        self.begun = self.done = self.updates = 0
        self.passes: list[Task] = []
        self._read_at: dict[int, int] = {}
        self._totals: set[Buffer] = set()
        self._from_others = {kind: flow.received(kind, number) for kind in LETTERS}
        self._before()

    # -- what comes ----------------------------------------------------------------------------

    @cached_property
    def _names(self) -> Mapping[str, int]:
        return {v.name: n for n, v in enumerate(self.flow.dataflow.values)}

    def tag(self, buffer: Buffer) -> int:
        """The number by which a receiver knows a buffer."""
        return self._names[buffer.value] * self.flow.microbatches + buffer.microbatch

    def tagged(self, tag: int) -> Buffer:
        """The buffer of a tag."""
        value, key = divmod(tag, self.flow.microbatches)
        return Buffer(self.flow.dataflow.values[value].name, key)

    def coming(self) -> Counter[int]:
        """Number of arrays of a call that each other stage sends to this one."""
        flow, coming = self.flow, Counter[int]()
        for source in range(flow.stages):
            for kind in LETTERS if source != self.number else ():
                spec = flow.spec(kind, source)
                for n in () if spec is None else spec.writes:
                    if any(w.stage == self.number for w in flow.dataflow.readers.get(n, ())):
                        coming[source] += flow.microbatches
        return coming

    @property
    def may_begin(self) -> bool:
        """Whether the next key is within the number that may be under way."""
        return self.begun < min(self.flow.microbatches, self.done + self.flow.most_active)

    def has(self, kind: Kind) -> bool:
        """Whether all that the next pass of a kind takes of a microbatch is there."""
        key = self.begun if kind == "forward" else self.done
        if kind == "backward" and key >= self.begun:
            return False
        return all(Buffer(n, key) in self.worker.arrays for n in self._from_others[kind])

    # -- passes --------------------------------------------------------------------------------

    def run(self, kind: Kind) -> list[tuple[int, Buffer, Any]]:
        """Carries the next pass of a kind out, with the update that it completes.

        Returns:
            What is sent: (stage, buffer, array).
        """
        key = self.begun if kind == "forward" else self.done
        self.passes.append(Task(kind, self.number, key))
        if kind == "forward":
            self._read_at[key] = self.updates
        else:
            age = self.updates - self._read_at.pop(key)
            assert age <= self.flow.most_stale, f"{self.passes[-1]} is {age} updates after its forward pass"
        sent = self._pass(kind, key)
        if kind == "backward":
            if (key + 1) % self.flow.update_every == 0:
                self._update()
            self._free([b for b in self.worker.arrays if b.microbatch == key])
        return sent

    def count(self, kind: Kind) -> None:
        """Notes that a pass is through and that what it sent has arrived."""
        if kind == "forward":
            self.begun += 1
        else:
            self.done += 1

    def finish(self) -> None:
        """Results of a call besides state, once every key is through."""
        spec = self.flow.spec("update", self.number, METRICS)
        if spec is not None:
            self.worker.do(Apply(spec.work, tuple(map(Buffer, spec.reads)), tuple(map(Buffer, spec.writes))))
        self.worker.finish()

    def _pass(self, kind: Kind, key: int) -> list[tuple[int, Buffer, Any]]:
        spec, dataflow = self.flow.spec(kind, self.number), self.flow.dataflow
        if spec is None or not (spec.reads or spec.writes or spec.accumulates):
            return []
        reads = tuple(Buffer(n) if dataflow.by_name[n].lifetime == "step" else Buffer(n, key) for n in spec.reads)
        writes = tuple(Buffer(n, key) for n in (*spec.writes, *spec.accumulates))
        jax.block_until_ready(self.worker.do(Run(spec.work, key, reads, writes)))
        for n in spec.accumulates:
            for total in self._totals_of(n):
                first = total not in self._totals
                self._totals.add(total)
                self.worker.do(Accumulate(total, Buffer(n, key), dataflow.by_name[n].reduce or "sum", first))
        sent = []
        for n in spec.writes:
            for t in sorted({w.stage for w in dataflow.readers.get(n, ())} - {self.number}):
                sent.append((t, Buffer(n, key), self.worker.arrays[Buffer(n, key)]))
        if kind == "forward":
            later = self.flow.spec("backward", self.number)
            kept = set() if later is None else set(later.reads)
            self._free([b for b in self.worker.arrays if b.microbatch == key and b.value not in kept])
        return sent

    def _totals_of(self, name: str) -> list[Buffer]:
        metrics = [Buffer(name)] if name in self._update_reads(METRICS) else []
        return metrics + ([_total(name)] if name in self._update_reads(STATE) else [])

    def _update_reads(self, part: int) -> Sequence[str]:
        spec = self.flow.spec("update", self.number, part)
        return () if spec is None else spec.reads

    def _free(self, buffers: Sequence[Buffer]) -> None:
        self.worker.do(Free(tuple(buffers)))

    # -- the update ----------------------------------------------------------------------------

    def _update(self) -> None:
        shared, state = (self.flow.spec("update", self.number, part) for part in (SHARED, STATE))
        if shared is not None:
            self._apply(shared, [Buffer(n) for n in shared.writes])
        if state is not None:
            self._apply(state, [Buffer(self.flow.replaces[n]) for n in state.writes])
        for n in () if shared is None else shared.writes:
            self.worker.do(Stash(Buffer(n), Buffer(self.flow.replaces[n])))
            self._free([Buffer(n)])
        totals = [b for b in self._totals if b.origin != NONE]
        self._totals.difference_update(totals)
        self._free(totals)
        self.updates += 1
        self._before()

    def _apply(self, spec: WorkSpec, writes: Sequence[Buffer]) -> None:
        sums = self.flow.dataflow.by_name
        reads = tuple(_total(n) if sums[n].lifetime == "accumulator" else Buffer(n) for n in spec.reads)
        jax.block_until_ready(self.worker.do(Apply(spec.work, reads, tuple(writes))))

    def _before(self) -> None:
        """Values computed from the state that passes read."""
        spec = self.flow.spec("before", self.number)
        if spec is not None:
            reads, writes = tuple(map(Buffer, spec.reads)), tuple(map(Buffer, spec.writes))
            # No result may need the last ones, whose callbacks are of this call.
            jax.block_until_ready(self.worker.do(Run(spec.work, NONE, reads, writes)))


def _total(name: str) -> Buffer:
    """The accumulator of an update; that of a call's metrics has no origin."""
    return Buffer(name, NONE, 0)
