"""A plan without a flush: its programs, what they may not do, and its instruction lists.

`lower_without_flush` is the place to start. Each stage updates for itself, so that no update takes a value of another
stage. Schedules with versions of the weights get the lists of all calls; workers of AMPNet make the order at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from autopar._compat.primitives import bind
from autopar.errors import ScheduleError
from autopar.frontend import BoundGraph
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import dependents, taken_by
from autopar.ir.phases import phase_of
from autopar.lower.localize.base import AxisIndex, scalar
from autopar.lower.pipeline.build import CutPrograms, LoweredPipeline, cut_programs
from autopar.lower.pipeline.stage_program import Port, StageProgram
from autopar.lower.retrace import Step
from autopar.plan import Plan
from autopar.schedule import Dataflow, ValueRef, ValueSpec, Work, WorkSpec, build
from autopar.schedule.without_flush.ampnet import AmpFlow, is_ampnet, numbers_of
from autopar.schedule.without_flush.lists import METRICS, SHARED, STATE, StaleFlow, Windows, windows
from autopar.schedule.without_flush.schedules import VersionMap, no_flush_text
from autopar.schedule.without_flush.verify import audit_lists
from autopar.stages import StageMap, stage_parts

_REMEDY = 'schedule="1f1b", which flushes'


@dataclass(frozen=True, eq=False)
class PipelineWithoutFlush:
    """A pipeline without a flush, ready to be loaded.

    Args:
        pipeline: its plan and programs.
        calls: instruction lists of all calls; of AMPNet, whose workers make the order, what they carry out.
    """

    pipeline: LoweredPipeline
    calls: Windows | AmpFlow


def lower_without_flush(step: Step, plan: Plan, arguments: Set[str], platform: str = "cpu") -> PipelineWithoutFlush:
    """Programs of ``plan``, whose stages update each for itself, and what its calls carry out.

    Args:
        step: the step that the plan was made for: not in microbatches, its stacks taken apart as the plan says.
        plan: a plan with several stages.
        arguments: names of the step's inputs that a call brings; the others are constants.
        platform: jax's name of the kind of devices.

    Raises:
        ScheduleError: the step needs a flush: an update takes something of other stages, or of a part of the batch what
            is no sum; what the loss takes of the state without the batch is outside the passes; with versions of
            weights a pass reads an argument that is neither batch nor state.
    """
    schedule, stages, microbatches = plan.schedule, plan.num_stages, plan.num_microbatches
    versions = None if is_ampnet(schedule) else VersionMap(schedule, stages, microbatches)
    every = numbers_of(schedule, stages)[1] if versions is None else versions.update_every
    cut = cut_programs(step, plan, platform, separate_state=True)
    _check_crossing(step.graph, cut.map, schedule)
    _check_phases(step.graph, cut.map, schedule)
    shared = _shared_programs(step.program, cut, schedule)
    programs = tuple(_scaled(p, microbatches // every) if _is_state(p) else p for p in (*cut.programs, *shared))
    dataflow, replaces = cut.dataflow(frozenset(), shared), _replaces(step.graph, programs)
    calls: Windows | AmpFlow
    if versions is None:
        calls = AmpFlow.of(schedule, stages, microbatches, dataflow, replaces)
    else:
        flow = StaleFlow(dataflow, versions, microbatches, replaces)
        _check_arguments(flow, arguments - {str(o.updates) for o in step.graph.outputs})
        _check_metrics(step.graph, flow)
        calls = windows(flow)
        audit_lists(calls)
    if every < microbatches:
        _check_shares(step.graph, dataflow, schedule)
    pipeline = LoweredPipeline(plan, cut.map, programs, build(cut.table, dataflow), cut.callbacks)
    return PipelineWithoutFlush(pipeline, calls)


def _is_state(program: StageProgram) -> bool:
    return program.work.kind == "update" and program.work.part == STATE


def _replaces(graph: Graph, programs: Sequence[StageProgram]) -> dict[str, str]:
    """Input of which a value that an update writes is the next one, by value."""
    replaced: dict[str, str] = {}
    for program in programs:
        if program.work.kind == "update" and program.work.part != METRICS:
            for port in program.writes:
                updates = graph.outputs[port.ref.number].updates
                assert updates is not None, f"{port.name} replaces nothing"
                replaced[port.name] = str(ValueRef("in", updates, program.work.stage))
    return replaced


def _scaled(program: StageProgram, factor: int) -> StageProgram:
    """An update fed by one of ``factor`` shares of the batch's gradient, made the whole batch's size.

    The gradient of a mean over the batch is the sum of its microbatches' shares; ``factor`` times the share of the
    ``factor``-th part of them is the mean over that part.
    """
    if factor == 1:
        return program
    sums = tuple(p.ref.kind == "sum" for p in program.reads)

    def on_device(microbatch: Any, microbatch_inputs: Sequence[Any], index: AxisIndex) -> list[Any]:
        scaled = [x * factor if s else x for x, s in zip(microbatch_inputs, sums, strict=True)]
        return program.on_device(microbatch, scaled, index)

    return replace(program, on_device=on_device)


# -- state that several stages read ----------------------------------------------------------------


def _shared_programs(bound: BoundGraph, cut: CutPrograms, schedule: str) -> tuple[StageProgram, ...]:
    """Programs of the stages that read state which another stage returns, as a count of steps."""
    graph = bound.graph
    owners = {i: p.stage for p in stage_parts(graph, cut.map) for i in p.outputs}
    ports = {(p.work.stage, port.name): port for p in cut.programs for port in p.reads}
    outside = [op for op in graph.operators if op.id not in cut.map.body]
    programs = []
    for s in range(cut.map.count):
        wanted = []
        for n, o in enumerate(graph.outputs):
            reads = o.updates is not None and s in cut.map.inputs.get(o.updates, ())
            if reads and owners[n] != s and o.operand != o.updates:
                wanted.append(n)
        if wanted:
            programs.append(_shared_program(bound, outside, s, wanted, ports, schedule))
    return tuple(programs)


def _shared_program(
    bound: BoundGraph,
    outside: Sequence[Operator],
    stage: int,
    wanted: Sequence[int],
    ports: Mapping[tuple[int, str], Port],
    schedule: str,
) -> StageProgram:
    graph = bound.graph
    operands = [graph.outputs[n].operand for n in wanted]
    ops, taken = taken_by(outside, operands)
    names = {i.name for i in graph.inputs}
    writes = []
    for n in wanted:
        port = ports[stage, str(ValueRef("in", str(graph.outputs[n].updates), stage))]
        writes.append(Port(ValueRef("mid", str(n), stage), port.type, port.layout))
    lacking = [n for n in taken if n not in names or (stage, str(ValueRef("in", n, stage))) not in ports]
    if lacking:
        op = graph.producers.get(lacking[0])
        raise ScheduleError(
            f"{graph.outputs[wanted[0]].path} is read by stage {stage}, and its update takes {lacking[0]}, which other "
            f"stages have: {no_flush_text(schedule)}",
            cause="state that all stages read depends on a loss or on gradients",
            remedy=_REMEDY,
            source=(op.source or None) if op is not None else None,
        )
    reads = tuple(ports[stage, str(ValueRef("in", n, stage))] for n in taken)
    return StageProgram(Work("update", stage, SHARED), reads, tuple(writes), (), _plain(bound, ops, taken, operands))


def _plain(
    bound: BoundGraph, ops: Sequence[Operator], taken: Sequence[str], operands: Sequence[Any]
) -> Callable[[Any, Sequence[Any], AxisIndex], list[Any]]:
    """Operators on whole values, which every device has."""

    def on_device(_: Any, microbatch_inputs: Sequence[Any], index: AxisIndex) -> list[Any]:
        env = dict(zip(taken, microbatch_inputs, strict=True))

        def read(o: Any) -> Any:
            return jnp.asarray(scalar(o)) if isinstance(o, Literal) else env[o]

        for op in ops:
            if op.primitive == "constant":
                outputs = [jnp.asarray(bound.constants[op.id])]
            else:
                b = bound.bounds[op.id]
                outputs = bind(b.primitive, b.params, [read(o) for o in op.operands])
            env.update((v.name, m) for v, m in zip(op.results, outputs, strict=True))
        return [read(o) for o in operands]

    return on_device


# -- what needs a flush ----------------------------------------------------------------------------


def _check_crossing(graph: Graph, map: StageMap, schedule: str) -> None:
    for part in stage_parts(graph, map):
        for r in part.received_late:
            reader = next((op for op in graph.operators if op.id in part.late and r.name in op.reads), None)
            raise ScheduleError(
                f"the update of stage {part.stage} takes {r.name} of stage {r.source}; schedule {schedule} has no "
                "moment at which all stages are through",
                cause="gradients are clipped by their global norm, or two stages have one parameter (tied embeddings)",
                remedy=f"clip by parameter (optax.clip, clip_by_block_rms), untie, or {_REMEDY}",
                source=(reader.source or None) if reader is not None else None,
            )


def _check_phases(graph: Graph, map: StageMap, schedule: str) -> None:
    """Refuses derivatives outside of the passes: they would read the newest parameters, not those of the passes."""
    state = {o.updates for o in graph.outputs if o.updates is not None}
    inputs = {i.name: i for i in graph.inputs}
    late = [op for op in graph.operators if op.id in map.update]
    outside = [op for op in graph.operators if op.id not in map.body]
    touched = {op.id for op in dependents(outside, {n for n in state if inputs[n].type.rank})}
    for op in late:
        if op.id in touched and phase_of(op) != "update":
            raise ScheduleError(
                f"{op.primitive} is part of the loss and takes parameters, but no batch; schedule {schedule} runs it "
                "with the update, which has other parameters than the passes",
                cause="a penalty of the parameters in the loss",
                remedy=f"weight decay in the optimizer (optax.add_decayed_weights), or {_REMEDY}",
                source=op.source or None,
            )


def _check_arguments(flow: StaleFlow, arguments: Set[str]) -> None:
    for spec in flow.dataflow.works:
        for n in spec.reads if spec.work.kind != "update" else ():
            ref = flow.dataflow.by_name[n].ref
            if ref is not None and ref.kind == "in" and ref.name in arguments:
                raise ScheduleError(
                    f"{ref.name} is read by stage {spec.work.stage} and is neither batch nor state: microbatches of "
                    f"several calls are under way at once in schedule {flow.versions.name}",
                    cause="a random key or a number is an argument of the step",
                    remedy=f"keep it in the state, or {_REMEDY}",
                )


def _check_metrics(graph: Graph, flow: StaleFlow) -> None:
    for spec, value, writer in _sums(flow.dataflow):
        if spec.work.part == METRICS and writer.kind == "backward" and writer.stage < flow.stages - 1:
            raise ScheduleError(
                f"a metric takes a gradient of stage {writer.stage}, whose last backward passes of a call run in "
                f"the next one in schedule {flow.versions.name}",
                cause="norms of gradients among the metrics",
                remedy=f"leave it out, or {_REMEDY}",
                source=_source(graph, value),
            )


def _check_shares(graph: Graph, dataflow: Dataflow, schedule: str) -> None:
    """Raises ScheduleError where an update takes of a part of the batch what is no sum, as the largest gradient."""
    for spec, value, writer in _sums(dataflow):
        if spec.work.part == STATE and not _adds(graph, value):
            name = "" if value.ref is None else value.ref.name
            raise ScheduleError(
                f"the state of stage {writer.stage} takes the {value.reduce} of {name} over the batch; "
                f"schedule {schedule} updates after a part of it",
                remedy=f'schedule="2bw", or {_REMEDY}',
                source=_source(graph, value),
            )


def _sums(dataflow: Dataflow) -> Iterator[tuple[WorkSpec, ValueSpec, Work]]:
    """(update, accumulator that it reads, pass that contributes to it)."""
    for spec in dataflow.works:
        for n in spec.reads if spec.work.kind == "update" else ():
            value, writer = dataflow.by_name[n], dataflow.writers.get(n)
            if value.lifetime == "accumulator" and writer is not None and value.ref is not None:
                yield spec, value, writer


def _source(graph: Graph, value: ValueSpec) -> str | None:
    maker = graph.producers.get(value.ref.name) if value.ref is not None else None
    return (maker.source or None) if maker is not None else None


def _adds(graph: Graph, value: ValueSpec) -> bool:
    """Whether a value is a sum of floats."""
    type = graph.types.get(value.ref.name) if value.ref is not None else None
    return value.reduce == "sum" and (type is None or (type.dtype != "bool" and type.dtype[0] in "fbc"))
