"""A pipeline without a flush on this process's devices: calls that leave microbatches under way, and the drain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.frontend import Traced
from autopar.lower.pipeline.stale import StalePipeline
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.arrays import copied
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.local_pipeline import load_pipeline
from autopar.runtime.pipeline import LocalPipeline, Store
from autopar.runtime.without_flush import (
    ARGUMENT,
    CarriedCalls,
    UnflushedProgram,
    arguments_of_updates,
    carry_key,
    lacking,
    outputs_of_updates,
)
from autopar.schedule import NONE, Buffer, Program
from autopar.schedule.memory import WorkerMemory
from autopar.schedule.stale import Window, Windows


@dataclass(frozen=True, eq=False)
class StaleProgram(UnflushedProgram, CarriedCalls):
    """A pipeline without a flush, loaded; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        pipeline: its programs, and where inputs and outputs lie.
        windows: instruction lists of all calls.
    """

    windows: Windows

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker when its list of a full pipeline needs the most; empty: not known."""
        return ()

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device of the worker that needs most: its buffers, one of each version, and what programs need."""
        return max(self._worker_bytes(s) for s in range(self.windows.flow.stages))

    def _worker_bytes(self, stage: int) -> int:
        flow = self.windows.flow
        window = self.windows.calls[-1]
        sizes = {v.name: v.bytes for v in flow.dataflow.values}
        lasting = sum(
            v.bytes for v in flow.dataflow.values if v.is_input and stage in v.stages and v.lifetime != "microbatch"
        )
        carried = sum(sizes[b.value] for b in window.starts[stage])
        batch = sum(sizes[b.value] for b in window.batch[stage])
        temporary = 0
        for (worker, _), loaded in self.pipeline.runtime.loaded.items():
            if worker == stage and loaded.compiled is not None:
                m = loaded.compiled.memory_analysis()
                temporary = max(temporary, int(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes))
        return lasting + carried + batch + temporary

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """None: every call says what is under way."""
        return None

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Refuses: what is under way would be lost. See `call`."""
        raise self.refused(self.windows.flow.versions.name)

    def call(self, placed: Sequence[Any], carry: Mapping[str, Any], calls: int) -> tuple[list[Any], dict[str, Any]]:
        """See `CarriedCalls.call`."""
        inputs = self.pipeline.by_name([*placed, *self.pipeline.constants])
        window = self.windows.call(calls)
        store = self._run(window, inputs, carry if calls else {})
        left = self._carry(window, store)
        left |= {ARGUMENT + n: inputs[n] for n in self._arguments}
        return self.pipeline.joined(self._outputs(store, metrics=True)), left

    def drain(self, leaves: Sequence[Any], carry: Mapping[str, Any], calls: int) -> dict[int, Any]:
        """See `CarriedCalls.drain`."""
        placed = [jax.device_put(copied(x), s) for x, s in zip(leaves, self.program.input_shardings, strict=False)]
        pipeline = self.pipeline
        flat: dict[str, Any] = {}
        names = [i.name for i in pipeline.split_step.step.graph.inputs]
        for n, array in enumerate(placed):
            parts_of_leaf = pipeline.leaves[n].split(array) if n in pipeline.leaves else [array]
            flat |= {names[at]: piece for at, piece in zip(pipeline.split_step.inputs[n], parts_of_leaf, strict=True)}
        closed = len(pipeline.split_step.inputs) - len(pipeline.constants)
        for n, array in enumerate(pipeline.constants):
            flat |= {names[at]: array for at in pipeline.split_step.inputs[closed + n]}
        flat |= {k.removeprefix(ARGUMENT): a for k, a in carry.items() if k.startswith(ARGUMENT)}
        outputs = self._outputs(self._run(self.windows.drain(calls), flat, carry), metrics=False)
        joined = {}
        for n, at in enumerate(pipeline.split_step.outputs):
            if all(i in outputs for i in at):
                joined[n] = pipeline.results[n].join([outputs[i] for i in at]) if len(at) > 1 else outputs[at[0]]
        return joined

    # -- one list ------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[Any]:
        """(shape, dtype, weak type) of each input."""
        return self.pipeline.entries

    @cached_property
    def _arguments(self) -> tuple[str, ...]:
        return arguments_of_updates(self.windows.flow, self.pipeline.split_step, len(self.pipeline.constants))

    def _run(self, window: Window, inputs: Mapping[str, Any], carry: Mapping[str, Any]) -> Store:
        pipeline, flow = self.pipeline, self.windows.flow
        start: dict[tuple[int, Buffer], Any] = {}
        for value in flow.dataflow.values:
            if not value.is_input or value.ref is None:
                continue
            if value.ref.kind == "in":
                for worker in value.stages:
                    key = worker, Buffer(value.name)
                    if not (carry and flow.is_carried(key[1])):
                        start[key] = pipeline.put(worker, value.name, inputs[value.ref.name])
            elif any(window.batch):
                parts_of_leaf: dict[tuple[int, Buffer], Any] = {}
                pipeline.put_microbatches(parts_of_leaf, value, value.ref.name, inputs[value.ref.name])
                start |= {(w, Buffer(b.value, b.microbatch + flow.lag)): a for (w, b), a in parts_of_leaf.items()}
        if carry:
            for worker, buffers in enumerate(window.starts):
                for b in buffers:
                    start[worker, b] = self._carried(carry, worker, b)
        lowered = pipeline.lowered.instructions
        runtime = LocalPipeline(Program(lowered.table, flow.dataflow, window.workers), pipeline.runtime.loaded)
        with LAUNCHES:
            return runtime.run(start)

    def _carried(self, carry: Mapping[str, Any], worker: int, b: Buffer) -> Any:
        key = carry_key(worker, b)
        if key not in carry:
            raise lacking(key)
        # Totals are written over, and a state may be used twice.
        array = carry[key] if b.origin == NONE else jnp.copy(carry[key])
        place = self._places.get((worker, b.value))
        return jax.device_put(array, place) if place is not None and array.sharding != place else array

    @cached_property
    def _places(self) -> Mapping[tuple[int, str], NamedSharding]:
        """Layout of each value on the worker that reads it."""
        return {at: port.sharding(mesh) for at, (port, mesh) in self.pipeline.runtime.ports.items()}

    def _carry(self, window: Window, store: Store) -> dict[str, Any]:
        flow = self.windows.flow
        carried = {}
        for (worker, b), array in sorted(store.arrays.items(), key=lambda e: e[0]):
            if flow.is_carried(b) and (after := flow.shifted(b)) in window.ends[worker]:
                carried[carry_key(worker, after)] = array
        return carried

    def _outputs(self, store: Store, *, metrics: bool) -> dict[int, Any]:
        """Outputs of the lowered step by number: the newest state, and what else a call returns."""
        flow = self.windows.flow
        return outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: store.arrays[s, b], metrics=metrics)


def load_stale(traced: Traced, split_step: SplitStep, stale: StalePipeline, devices: Sequence[Any]) -> StaleProgram:
    """Compiles a pipeline without a flush for this process's devices; arguments and errors as of `load_pipeline`."""
    flow = stale.windows.flow
    everything = frozenset(v.name for v in flow.dataflow.values)  # what is under way belongs to the caller
    return StaleProgram(load_pipeline(traced, split_step, stale.pipeline, devices, spared=everything), stale.windows)
