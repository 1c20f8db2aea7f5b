"""Pipelines without a flush: calls that leave microbatches under way, and the drain.

`StaleProgram` is the loaded step, wherever its stages are. `load_stale` makes the one of this process or of a world of
processes, which hands each window's lists to a `WorldLists`; `autopar.runtime.ray.stale.load_remote_stale` makes that
of workers, for which each window is a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec

from autopar._compat.dtypes import dtype_name, jax_dtype
from autopar._compat.world import world
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.lower.pipeline.stale import StalePipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.hosts.arrays import empty
from autopar.runtime.hosts.lists_load import load_lists
from autopar.runtime.hosts.step_lists import LaidOut, StepLists, input_buffer
from autopar.runtime.hosts.world_lists import WorldLists
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.without_flush import (
    ARGUMENT,
    OverAnother,
    arguments_of_updates,
    carry_key,
    lacking,
    outputs_of_updates,
)
from autopar.schedule import NONE, Buffer, Task
from autopar.schedule.stale import Window, Windows

#: (the pipeline, inputs of the lowered step by name, what is under way, calls so far, whether it is a drain) -> outputs
#: of the lowered step by number, and what is under way behind it.
Carry: TypeAlias = Callable[
    [Any, Mapping[str, Any], Mapping[str, Any], int, bool], tuple[dict[int, Any], dict[str, Any]]
]


@dataclass(frozen=True, eq=False)
class StaleProgram(OverAnother):
    """A pipeline without a flush, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        windows: instruction lists of all calls.
        carry_out: runs a window.
        most_bytes: bytes a device of the worker that needs most; None where ``under`` knows them.
    """

    windows: Windows
    carry_out: Carry
    most_bytes: int | None = None

    @property
    def entries(self) -> Sequence[Any]:
        """(shape, dtype, weak type) of each input."""
        return self.under.entries

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device of the worker that needs most."""
        return self.under.footprint_bytes if self.most_bytes is None else self.most_bytes

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """None: every call says what is under way."""
        return None

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Refuses: what is under way would be lost. See `call`."""
        raise AutoparError(
            f"a step with schedule {self.windows.flow.versions.name} is called by the decorated function",
            remedy="step(state, batch), and step.drain(state) at the end",
        )

    def call(self, placed: Sequence[Any], carry: Mapping[str, Any], calls: int) -> tuple[list[Any], dict[str, Any]]:
        """Runs a call.

        Args:
            placed: inputs as `place_all` made them.
            carry: what the calls before left under way; empty before the first.
            calls: their number.

        Returns:
            The results of the function, and what is under way now.
        """
        under = self.under
        inputs = self._named(dict(enumerate([*placed, *under.constants])))
        outputs, left = self.carry_out(under, inputs, carry if calls else {}, calls, False)
        arguments = arguments_of_updates(self.windows.flow, under.split_step, len(under.constants))
        return under.joined(outputs), left | {ARGUMENT + n: inputs[n] for n in arguments}

    def drain(self, leaves: Sequence[Any], carry: Mapping[str, Any], calls: int) -> dict[int, Any]:
        """Runs what is under way to its end.

        Args:
            leaves: of the state, the first inputs of the function.
            carry: what is under way.
            calls: number of calls so far, at least one.

        Returns:
            New leaves by number of the function's output.
        """
        under = self.under
        constants = enumerate(under.constants, len(under.split_step.inputs) - len(under.constants))
        inputs = self._named(dict(enumerate(under.place_all(leaves))) | dict(constants))
        inputs |= {k.removeprefix(ARGUMENT): a for k, a in carry.items() if k.startswith(ARGUMENT)}
        outputs, _ = self.carry_out(under, inputs, carry, calls, True)
        whole = {n: at for n, at in enumerate(under.split_step.outputs) if all(i in outputs for i in at)}
        return {n: under.join(n, [outputs[i] for i in at]) for n, at in whole.items()}

    def _named(self, leaves: Mapping[int, Any]) -> dict[str, Any]:
        names = [i.name for i in self.under.split_step.step.graph.inputs]
        return {names[i]: array for i, array in self.under.inputs_of(leaves).items()}


@dataclass(frozen=True, eq=False)
class _OnLists:
    """Windows of a pipeline on the devices of this process or of a world.

    Args:
        windows: instruction lists of all calls.
        prepared: lists of calls by what they depend on.
    """

    windows: Windows
    prepared: dict[Any, StepLists] = field(default_factory=dict)

    def __call__(
        self, pipeline: WorldLists, inputs: Mapping[str, Any], carry: Mapping[str, Any], calls: int, drain: bool
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """See `Carry`."""
        flow, window = self.windows.flow, (self.windows.drain if drain else self.windows.call)(calls)
        batch = pipeline.placed_batch(inputs) if any(window.batch) else set()
        start: dict[tuple[int, Buffer], Any] = {}
        lie: dict[tuple[int, Buffer], LaidOut] = {}
        copies = self._inputs(pipeline, window, inputs, bool(carry), batch, start, lie)
        if carry:
            _add_carried(pipeline, window, carry, start, lie)
        places = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b), metrics=not drain)
        ends = {n: pipeline.ends[n] for n in places}
        results = [
            (stage, b, ends[n], Buffer(f"output/{n}")) for n, (stage, b) in sorted(places.items())
            if ends[n].worker != stage
        ]  # fmt: skip
        key = id(window), drain, bool(carry), frozenset(batch), _layouts(pipeline, window, lie)
        if key not in self.prepared:
            lists = [w.instructions for w in window.workers]
            self.prepared[key] = pipeline.maker.extended(lists, copies, results, lie)
            pipeline.maker.programs.compile()
        step = self.prepared[key]
        with LAUNCHES:
            workers = pipeline.carry_out(step, start)
        buffers = {n: b if ends[n].worker == s else Buffer(f"output/{n}") for n, (s, b) in places.items()}
        outputs = {n: pipeline.output(workers, n, ends[n], b) for n, b in buffers.items()}
        left = {}
        for w, b in window.left(flow):
            laid = step.arrays[w, b]
            there = (
                empty(laid.shape, laid.sharding, jax_dtype(laid.dtype)) if w not in workers else workers[w].arrays[b]
            )
            left[carry_key(w, flow.shifted(b))] = there
        if not drain:
            with LAUNCHES:
                outputs.update(pipeline.announcement.tell(outputs))
        return outputs, left

    def _inputs(
        self,
        pipeline: WorldLists,
        window: Window,
        inputs: Mapping[str, Any],
        carries: bool,
        batch: set[str],
        start: dict[tuple[int, Buffer], Any],
        lie: dict[tuple[int, Buffer], LaidOut],
    ) -> list[tuple[int, int, Buffer, Buffer]]:
        """Fills in what lies where when a window begins, but for what is carried; returns what is sent first."""
        flow = self.windows.flow
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


def _layouts(pipeline: WorldLists, window: Window, lie: Mapping[tuple[int, Buffer], LaidOut]) -> tuple[LaidOut, ...]:
    """Layouts that the window does not say: of what is carried and no program reads."""
    carried = ((w, b) for w, buffers in enumerate(window.starts) for b in sorted(buffers))
    return tuple(lie[w, b] for w, b in carried if (w, b.value) not in pipeline.ports and (w, b) in lie)


def _add_carried(
    pipeline: WorldLists,
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
            known = pipeline.ports.get((worker, b.value))
            place = array.sharding if known is None else known[0].sharding(known[1])
            lie[worker, b] = LaidOut(array.shape, dtype_name(array.dtype), place)
            if worker in pipeline.workers_here:
                # Totals are written over, and a state may be used twice.
                safe = array if b.origin == NONE else jnp.copy(array)
                start[worker, b] = safe if safe.sharding == place else jax.device_put(safe, place)


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
    return StaleProgram(pipeline, stale.windows, _OnLists(stale.windows), most)


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
