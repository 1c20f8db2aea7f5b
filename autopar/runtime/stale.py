"""A pipeline without a flush, in one process or in several: calls that leave microbatches under way, and the drain.

`load_stale` makes a `StaleProgram`, which hands each call's lists to a `WorldLists`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from autopar._compat.dtypes import dtype_name, jax_dtype
from autopar._compat.world import world
from autopar.frontend import Traced
from autopar.lower.pipeline.stale import StalePipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.hosts.arrays import empty
from autopar.runtime.hosts.lists_load import load_lists
from autopar.runtime.hosts.step_lists import LaidOut, StepLists, input_buffer
from autopar.runtime.hosts.world_lists import WorldLists
from autopar.runtime.interpreter import Worker
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.without_flush import (
    ARGUMENT,
    CarriedCalls,
    UnflushedProgram,
    arguments_of_updates,
    carry_key,
    lacking,
    outputs_of_updates,
)
from autopar.schedule import NONE, Buffer, Task
from autopar.schedule.memory import WorkerMemory
from autopar.schedule.stale import Window, Windows


@dataclass(frozen=True, eq=False)
class StaleProgram(UnflushedProgram[WorldLists], CarriedCalls):
    """A pipeline without a flush, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        windows: instruction lists of all calls.
        footprint_bytes: bytes a device of the worker that needs most.
        prepared: lists of calls by what they depend on.
    """

    windows: Windows
    footprint_bytes: int
    prepared: dict[Any, StepLists] = field(default_factory=dict)

    @property
    def entries(self) -> Sequence[Any]:
        """(shape, dtype, weak type) of each input."""
        return self.pipeline.entries

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Empty: not known."""
        return ()

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """None: every call says what is under way."""
        return None

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Refuses: what is under way would be lost. See `call`."""
        raise self.refused(self.windows.flow.versions.name)

    def call(self, placed: Sequence[Any], carry: Mapping[str, Any], calls: int) -> tuple[list[Any], dict[str, Any]]:
        """See `CarriedCalls.call`."""
        inputs = self.pipeline.by_name(self.pipeline.without_aliases([*placed, *self.pipeline.constants]))
        outputs, left = self._run(self.windows.call(calls), inputs, carry if calls else {}, metrics=True)
        with LAUNCHES:
            outputs.update(self.pipeline.announcement.tell(outputs))
        flow, constants = self.windows.flow, len(self.pipeline.constants)
        for name in arguments_of_updates(flow, self.pipeline.split_step, constants):
            left[ARGUMENT + name] = inputs[name]
        return self.pipeline.joined(outputs), left

    def drain(self, leaves: Sequence[Any], carry: Mapping[str, Any], calls: int) -> dict[int, Any]:
        """See `CarriedCalls.drain`."""
        pipeline = self.pipeline
        step, inputs = pipeline.split_step, dict[str, Any]()
        names = [i.name for i in step.step.graph.inputs]
        closed = len(step.inputs) - len(pipeline.constants)
        arrays = dict(enumerate(pipeline.shard_leading(leaves)))
        arrays |= {closed + n: c for n, c in enumerate(pipeline.constants)}
        for n, array in arrays.items():
            parts = pipeline.leaves[n].split(array) if n in pipeline.leaves else [array]
            inputs |= {names[at]: part for at, part in zip(step.inputs[n], parts, strict=True)}
        inputs |= {k.removeprefix(ARGUMENT): a for k, a in carry.items() if k.startswith(ARGUMENT)}
        outputs, _ = self._run(self.windows.drain(calls), inputs, carry, metrics=False)
        joined = {}
        for n, at in enumerate(step.outputs):
            if all(i in outputs for i in at):
                joined[n] = pipeline.results[n].join([outputs[i] for i in at]) if len(at) > 1 else outputs[at[0]]
        return joined

    # -- one list ------------------------------------------------------------------------------

    def _run(
        self, window: Window, inputs: Mapping[str, Any], carry: Mapping[str, Any], *, metrics: bool
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """Outputs of the lowered step by number, and what is under way behind a window."""
        pipeline, flow = self.pipeline, self.windows.flow
        batch = pipeline.placed_batch(inputs) if any(window.batch) else set()
        start: dict[tuple[int, Buffer], Any] = {}
        lie: dict[tuple[int, Buffer], LaidOut] = {}
        copies = self._inputs(window, inputs, bool(carry), batch, start, lie)
        if carry:
            self._carried(window, carry, start, lie)
        places = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b), metrics=metrics)
        ends = {n: pipeline.ends[n] for n in places}
        results = [
            (stage, b, ends[n], Buffer(f"output/{n}")) for n, (stage, b) in sorted(places.items())
            if ends[n].worker != stage
        ]  # fmt: skip
        key = id(window), metrics, bool(carry), frozenset(batch), self._layouts(window, lie)
        if key not in self.prepared:
            lists = [w.instructions for w in window.workers]
            self.prepared[key] = pipeline.maker.extended(lists, copies, results, lie)
            pipeline.maker.programs.compile()
        step = self.prepared[key]
        with LAUNCHES:
            workers = pipeline.carry_out(step, start)
        buffers = {n: b if ends[n].worker == s else Buffer(f"output/{n}") for n, (s, b) in places.items()}
        outputs = {n: pipeline.output(workers, n, ends[n], b) for n, b in buffers.items()}
        return outputs, self._left(window, step, workers)

    def _layouts(self, window: Window, lie: Mapping[tuple[int, Buffer], LaidOut]) -> tuple[LaidOut, ...]:
        """Layouts that the window does not say: of what is carried and no program reads."""
        ports = self.pipeline.ports
        carried = ((w, b) for w, buffers in enumerate(window.starts) for b in sorted(buffers))
        return tuple(lie[w, b] for w, b in carried if (w, b.value) not in ports and (w, b) in lie)

    def _inputs(
        self,
        window: Window,
        inputs: Mapping[str, Any],
        carries: bool,
        batch: set[str],
        start: dict[tuple[int, Buffer], Any],
        lie: dict[tuple[int, Buffer], LaidOut],
    ) -> list[tuple[int, int, Buffer, Buffer]]:
        """Fills in what lies where when a window begins, but for what is carried; returns what is sent first."""
        pipeline, flow = self.pipeline, self.windows.flow
        copies: list[tuple[int, int, Buffer, Buffer]] = []
        for worker, buffers in enumerate(window.batch):
            lie.update({(worker, b): pipeline.maker.port_array(worker, b.value) for b in buffers})
        for value in flow.dataflow.values:
            if not value.is_input or value.ref is None:
                continue
            name = value.ref.name
            origin = pipeline.origins[pipeline.index[name]]
            here = origin.worker in pipeline.workers_here
            if value.ref.kind == "in":
                buffer = Buffer(value.name)
                readers = [] if carries and flow.is_carried(buffer) else value.stages
                for worker in readers:
                    lie[worker, buffer] = pipeline.maker.port_array(worker, value.name)
                    if worker != origin.worker:
                        lie[origin.worker, input_buffer(name)] = origin.array
                        copies.append((origin.worker, worker, input_buffer(name), buffer))
                        if here:
                            start[origin.worker, input_buffer(name)] = pipeline.at_origin(name, inputs[name])
                    elif here:
                        start[worker, buffer] = pipeline.put(worker, value.name, pipeline.at_origin(name, inputs[name]))
            elif any(window.batch):
                parts: dict[tuple[int, Buffer], Any] = {}
                pipeline.put_microbatches(parts, value.name, value.stages, name, inputs[name], batch)
                start.update({(w, _later(b, flow.lag)): a for (w, b), a in parts.items()})
                for k in range(flow.microbatches if name in batch else 0):
                    source = _later(input_buffer(name, k), flow.lag)
                    lie[origin.worker, source] = pipeline.maker.microbatch(value.name, name, origin)
                    table = pipeline.lowered.table
                    elsewhere = {table.worker_of(Task("forward", s, k)) for s in value.stages} - {origin.worker}
                    copies += [(origin.worker, w, source, _later(Buffer(value.name, k), flow.lag)) for w in elsewhere]
        return copies

    def _carried(
        self,
        window: Window,
        carry: Mapping[str, Any],
        start: dict[tuple[int, Buffer], Any],
        lie: dict[tuple[int, Buffer], LaidOut],
    ) -> None:
        """Adds what the call before left under way."""
        for worker, buffers in enumerate(window.starts):
            for b in sorted(buffers):
                key = carry_key(worker, b)
                if key not in carry:
                    raise lacking(key)
                array = carry[key]
                known = self.pipeline.ports.get((worker, b.value))
                place = array.sharding if known is None else known[0].sharding(known[1])
                lie[worker, b] = LaidOut(array.shape, dtype_name(array.dtype), place)
                if worker in self.pipeline.workers_here:
                    # Totals are written over, and a state may be used twice.
                    safe = array if b.origin == NONE else jnp.copy(array)
                    start[worker, b] = safe if safe.sharding == place else jax.device_put(safe, place)

    def _left(self, window: Window, step: StepLists, workers: Mapping[int, Worker]) -> dict[str, Any]:
        """The state under way behind a window, on every process; without data on processes that do not have it."""
        flow = self.windows.flow
        left = {}
        for (worker, b), array in sorted(step.arrays.items(), key=lambda e: e[0]):
            if b.value not in flow.dataflow.by_name or not flow.is_carried(b):
                continue
            after = flow.shifted(b)
            if after in window.ends[worker]:
                left[carry_key(worker, after)] = (
                    workers[worker].arrays[b]
                    if worker in workers
                    else empty(array.shape, array.sharding, jax_dtype(array.dtype))
                )
        return left


def _later(buffer: Buffer, by: int) -> Buffer:
    return Buffer(buffer.value, buffer.microbatch + by)


def load_stale(
    traced: Traced, split_step: SplitStep, stale: StalePipeline, devices: Sequence[Any], *, by_hand: bool = True
) -> StaleProgram:
    """Compiles a pipeline without a flush for all processes; arguments and errors as of `load_lists`."""
    flow = stale.windows.flow
    everything = frozenset(v.name for v in flow.dataflow.values)  # what is under way belongs to the caller
    pipeline = load_lists(
        traced, split_step, stale.pipeline, devices, spared=everything, by_hand=by_hand, flushes=False
    )
    most = max((_worker_bytes(pipeline, stale.windows, w) for w in pipeline.workers_here), default=0)
    processes = world()
    if processes is not None:
        turn = Agreement.next(processes, f"the lists of {traced.graph.name}")
        turn.compare([])
        most = max(msgspec.json.decode(raw, type=int) for raw in turn.gather(msgspec.json.encode(most)))
    return StaleProgram(pipeline, stale.windows, most)


def _worker_bytes(pipeline: WorldLists, windows: Windows, stage: int) -> int:
    """Bytes a device of a worker: its buffers, one of each version, and what programs need."""
    flow, window = windows.flow, windows.calls[-1]
    sizes = {v.name: v.bytes for v in flow.dataflow.values}
    lasting = sum(
        v.bytes for v in flow.dataflow.values if v.is_input and stage in v.stages and v.lifetime != "microbatch"
    )
    buffers = sum(sizes[b.value] for b in (*window.starts[stage], *window.batch[stage]))
    temporary = 0
    for (worker, _), loaded in pipeline.loaded.items():
        if worker == stage and loaded.compiled is not None:
            m = loaded.compiled.memory_analysis()
            temporary = max(temporary, int(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes))
    return lasting + buffers + temporary
