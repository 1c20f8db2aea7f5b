"""Pipelines without a flush on workers: each call is a step of lists of its own, or takes what has arrived (AMPNet).

`load_remote_stale` makes the program of schedules with versions: what is under way between calls is an input and a
result of steps, all of the same programs. `load_remote_ampnet` makes that of AMPNet: each worker takes what has
arrived, and the driver keeps the order that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from autopar.errors import ScheduleError
from autopar.frontend import Traced
from autopar.ir import Input, TensorType
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.exported import Axes
from autopar.lower.pipeline.stage_program import Port
from autopar.lower.split_layers import SplitStep
from autopar.runtime.ampnet import AmpProgram
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.program import RemoteProgram, deployment_of, load_program
from autopar.runtime.ray.source import ArrayPlace, Pipelined, Result, placement_text, places_of_inputs
from autopar.runtime.without_flush import StaleProgram, carry_key, lacking, outputs_of_updates
from autopar.schedule import Apply, Buffer, Instruction, Program, Run
from autopar.schedule.without_flush.ampnet import AmpFlow
from autopar.schedule.without_flush.lists import Window, Windows


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
class _Ports:
    """How the programs of a pipeline make and take values; stage s is on worker s.

    Args:
        by_name: by (stage, value) its port.
        axes: mesh axes of each stage.
    """

    by_name: Mapping[tuple[int, str], Port]
    axes: tuple[Axes, ...]

    @staticmethod
    def of(lowered: LoweredPipeline) -> _Ports:
        """Ports of a lowered pipeline."""
        ports = {(p.work.stage, port.name): port for p in lowered.programs for port in p.results}
        ports |= {(p.work.stage, port.name): port for p in lowered.programs for port in p.reads}
        return _Ports(ports, tuple(lowered.mesh_axes(s) for s in range(lowered.plan.num_stages)))

    def type(self, worker: int, name: str) -> TensorType:
        """Type of a value as a worker has it."""
        port = self.by_name[worker, name]
        return replace(port.type, shape=port.shape(dict(self.axes[worker])))

    def result(self, worker: int, b: Buffer) -> Result:
        """A buffer of a worker as a result of a step."""
        text = placement_text(worker, self.axes[worker], self.by_name[worker, b.value])
        return Result(worker, b, self.type(worker, b.value), text)


@dataclass(frozen=True, eq=False)
class _OnWorkers:
    """Windows of a pipeline as steps of workers, which are loaded when they are first run.

    Args:
        lowered: the pipeline.
        windows: instruction lists of all calls.
        ports: how its programs make and take values.
        inputs: of the lowered step.
        load: loads a step.
        loaded: those that are, by number of calls and whether they are drains.
    """

    lowered: LoweredPipeline
    windows: Windows
    ports: _Ports
    inputs: tuple[Input, ...]
    load: Callable[[Pipelined], RemotePipeline]
    loaded: dict[tuple[int, bool], tuple[WindowSource, RemotePipeline]] = field(default_factory=dict)

    def __call__(
        self, program: RemoteProgram, inputs: Mapping[str, Any], carry: Mapping[str, Any], calls: int, drain: bool
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """See `autopar.runtime.without_flush.Carry`; what it returns are handles."""
        content, pipeline = self.window(calls, drain)
        for key in content.carried:
            if key not in carry:
                raise lacking(key)
        names = [self.inputs[n].name for n in content.reads]
        results = pipeline.step([*(inputs[n] for n in names), *(carry[key] for key in content.carried)])
        count = len(content.outputs)
        return dict(zip(content.outputs, results, strict=False)), dict(zip(content.left, results[count:], strict=True))

    def window(self, calls: int, drain: bool) -> tuple[WindowSource, RemotePipeline]:
        """A call or a drain, loaded. The first call reads all inputs: its indices are those of the lowered step."""
        windows = self.windows
        at = min(calls, len(windows.drains) if drain else len(windows.calls) - 1), drain
        if at not in self.loaded:
            content = self._source((windows.drain if drain else windows.call)(calls), not calls, not drain)
            self.loaded[at] = content, self.load(content.source)
        return self.loaded[at]

    def _source(self, window: Window, begins: bool, metrics: bool) -> WindowSource:
        flow, pipeline, axes = self.windows.flow, self.lowered, self.ports.axes
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
                inputs.append(Input(carried[-1], self.ports.type(worker, b.value)))
        updated = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b), metrics=metrics)
        ends = window.left(flow)
        results = [self.ports.result(*place) for place in (*(updated[n] for n in sorted(updated)), *ends)]
        program = Program(pipeline.table, flow.dataflow, window.workers)
        batch = pipeline.map.microbatching.batch
        source = Pipelined(
            program, pipeline.programs, axes, tuple(inputs), batch, tuple(map(tuple, places)), tuple(results)
        )
        return WindowSource(
            source, reads, tuple(carried), tuple(sorted(updated)), tuple(carry_key(w, flow.shifted(b)) for w, b in ends)
        )

    def _given(self, window: Window, begins: bool) -> Iterator[tuple[int, ArrayPlace]]:
        """(worker, place) of what the caller's arguments are."""
        flow = self.windows.flow
        index = {i.name: n for n, i in enumerate(self.inputs)}
        batch = self.lowered.map.microbatching.batch
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


def load_remote_stale(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    windows: Windows,
    cluster: RayCluster,
    progress: Callable[[str], None] | None = None,
) -> StaleProgram:
    """Starts workers for a pipeline without a flush and compiles it there; other calls are compiled when they come.

    Other arguments and errors are those of `load_remote`.

    Args:
        windows: instruction lists of all calls.
    """

    def load(source: Pipelined) -> RemotePipeline:
        runtime = RemotePipeline(cluster.workers, deployment_of(source, lowered, cluster), progress)
        runtime.load()
        return runtime

    steps = _OnWorkers(lowered, windows, _Ports.of(lowered), split_step.step.graph.inputs, load)
    _, first = steps.window(0, False)  # puts and makes the arrays of all
    return StaleProgram(load_program(traced, split_step, first, ()), windows, steps)


def amp_source(split_step: SplitStep, lowered: LoweredPipeline, flow: AmpFlow) -> Pipelined:
    """AMPNet as a step of workers.

    Args:
        split_step: the step as it was lowered.
        lowered: its pipeline.
        flow: what a call carries out.
    """
    graph, ports = split_step.step.graph, _Ports.of(lowered)
    # The lists say who sends to whom; what they give up, a pass in another order may still read.
    workers = tuple(
        msgspec.structs.replace(w, instructions=tuple(map(_kept, w.instructions))) for w in lowered.instructions.workers
    )
    program = Program(lowered.table, flow.dataflow, workers)
    updated = outputs_of_updates(flow.dataflow, flow.replaces, lambda s, b: (s, b))
    results = tuple(ports.result(*place) for _, place in sorted(updated.items()))
    batch = lowered.map.microbatching.batch
    places = places_of_inputs(program, graph.inputs, batch)
    return Pipelined(program, lowered.programs, ports.axes, graph.inputs, batch, places, results, flow)


def _kept(instruction: Instruction) -> Instruction:
    """An instruction that gives nothing up."""
    return msgspec.structs.replace(instruction, donate=()) if isinstance(instruction, Run | Apply) else instruction


def load_remote_ampnet(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    flow: AmpFlow,
    cluster: RayCluster,
    progress: Callable[[str], None] | None = None,
) -> AmpProgram:
    """Starts workers for AMPNet and compiles it there; other arguments are those of `load_remote`.

    Args:
        flow: what a call carries out.

    Raises:
        ScheduleError: a worker has several processes, or workers form one world.
        ClusterError: the cluster has not as many devices as the plan wants, or workers do not start.
    """
    deployment = deployment_of(amp_source(split_step, lowered, flow), lowered, cluster)
    if cluster.run.world:
        raise ScheduleError(
            "AMPNet has no order that the workers of a world could follow",
            cause="it takes what arrives, and programs on the devices of two workers have to be begun in one order",
            remedy="Cluster.ray(transport='sockets'), or schedule='pipedream'",
        )
    if max(deployment.hosts) > 1:
        raise ScheduleError(
            f"a stage has {max(deployment.hosts)} processes, whose passes would have to come in one order",
            cause="AMPNet takes what arrives, which is another order in each process",
            remedy="ask Cluster.ray for workers with all devices of a stage, or use schedule='pipedream'",
        )
    runtime = RemotePipeline(cluster.workers, deployment, progress)
    runtime.load()
    program = load_program(traced, split_step, runtime, ())
    return AmpProgram(program, lowered.table.name, flow, _on_workers)


def _on_workers(
    program: RemoteProgram, flow: AmpFlow, placed: Sequence[Any], orders: tuple[str, ...]
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """Runs a call; its results are handles."""
    results = program.runtime.step(program.inputs(placed), orders=orders)
    return program.joined(dict(enumerate(results))), program.runtime.orders
