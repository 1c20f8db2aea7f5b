"""Lists of a pipeline without a flush as steps of workers: what is under way between calls is an input and a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir import Input, TensorType
from autopar.lower.pipeline.ports import Port
from autopar.lower.pipeline.stale import StalePipeline
from autopar.runtime.ray.source import ArrayPlace, Pipelined, Result, placement_text
from autopar.runtime.without_flush import carry_key, outputs_of_updates
from autopar.schedule import Buffer, Program, made_by
from autopar.schedule.stale import Window


@dataclass(frozen=True, eq=False)
class WindowSource:
    """The lists of one call, or of a drain, as a step.

    Args:
        source: the step: its inputs are those of the lowered step that it reads, then what is under way; its results
            are outputs, then what is under way at its end.
        reads: indices of inputs of the lowered step.
        carried: keys of what is under way before.
        outputs: numbers of outputs of the lowered step.
        left: keys of what is under way afterwards.
    """

    source: Pipelined
    reads: tuple[int, ...]
    carried: tuple[str, ...]
    outputs: tuple[int, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class WindowSources:
    """Steps of all calls and drains of a pipeline.

    Args:
        stale: the lists.
        inputs: of the lowered step.
        axes: mesh axes of each stage.
    """

    stale: StalePipeline
    inputs: tuple[Input, ...]
    axes: tuple[tuple[tuple[str, int], ...], ...]

    def call(self, number: int) -> WindowSource:
        """A call. The first one reads all inputs, so that its indices are those of the lowered step."""
        window = self.stale.windows.call(number)
        return self._source(window, begins=not number, metrics=True)

    def drain(self, calls: int) -> WindowSource:
        """The window that ends ``calls`` calls."""
        return self._source(self.stale.windows.drain(calls), begins=False, metrics=False)

    @cached_property
    def _ports(self) -> Mapping[tuple[int, str], Port]:
        """Ports of programs, by stage and name."""
        programs = self.stale.pipeline.programs
        ports = {(p.work.stage, port.name): port for p in programs for port in p.results}
        return ports | {(p.work.stage, port.name): port for p in programs for port in p.reads}

    def _type(self, worker: int, name: str) -> TensorType:
        port = self._ports[worker, name]
        return replace(port.type, shape=port.shape(dict(self.axes[worker])))

    def _source(self, window: Window, *, begins: bool, metrics: bool) -> WindowSource:
        flow, pipeline = self.stale.windows.flow, self.stale.pipeline
        given = list(self._given(window, begins))
        reads = tuple(range(len(self.inputs))) if begins else tuple(sorted({p.index for _, p in given}))
        index = {n: at for at, n in enumerate(reads)}
        places: list[list[ArrayPlace]] = [[] for _ in window.workers]
        for worker, place in given:
            places[worker].append(replace(place, index=index[place.index]))
        inputs = [self.inputs[n] for n in reads]
        carried: list[str] = []
        for worker, buffers in enumerate(() if begins else window.starts):
            for b in sorted(buffers):
                places[worker].append(ArrayPlace(b.value, len(inputs), buffer=b))
                carried.append(carry_key(worker, b))
                inputs.append(Input(carried[-1], self._type(worker, b.value)))
        updated = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b), metrics=metrics)
        ends = [
            (worker, b, carry_key(worker, flow.shifted(b)))
            for worker, buffers in enumerate(self._buffers(window))
            for b in sorted(buffers)
            if flow.is_carried(b) and flow.shifted(b) in window.ends[worker]
        ]
        results = [self._result(*updated[n]) for n in sorted(updated)] + [self._result(w, b) for w, b, _ in ends]
        program = Program(pipeline.table, flow.dataflow, window.workers)
        batch = pipeline.map.microbatching.batch
        source = Pipelined(
            program, pipeline.programs, self.axes, tuple(inputs), batch, tuple(map(tuple, places)), tuple(results)
        )
        return WindowSource(source, reads, tuple(carried), tuple(sorted(updated)), tuple(key for _, _, key in ends))

    def _given(self, window: Window, begins: bool) -> Iterator[tuple[int, ArrayPlace]]:
        """(worker, place) of what the caller's arguments are."""
        flow = self.stale.windows.flow
        index = {i.name: n for n, i in enumerate(self.inputs)}
        batch = self.stale.pipeline.map.microbatching.batch
        for value in flow.dataflow.values:
            if not value.is_input or value.ref is None:
                continue
            n = index[value.ref.name]
            if value.ref.kind == "in":
                if begins or not flow.is_carried(Buffer(value.name)):
                    yield from ((s, ArrayPlace(value.name, n)) for s in value.stages)
            elif any(window.batch):
                numbers = tuple(range(flow.microbatches))
                place = ArrayPlace(value.name, n, numbers, batch[value.ref.name], first=flow.lag)
                yield from ((s, place) for s in value.stages)

    def _buffers(self, window: Window) -> list[set[Buffer]]:
        """Buffers that exist at some time, by worker."""
        inputs = [v for v in self.stale.windows.flow.dataflow.values if v.is_input and v.lifetime == "step"]
        return [
            set(window.starts[w])
            | window.batch[w]
            | {Buffer(v.name) for v in inputs if w in v.stages}
            | {b for i in program.instructions for b in made_by(i)}
            for w, program in enumerate(window.workers)
        ]

    def _result(self, worker: int, b: Buffer) -> Result:
        text = placement_text(worker, self.axes[worker], self._ports[worker, b.value])
        return Result(worker, b, self._type(worker, b.value), text)
