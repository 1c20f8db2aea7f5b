"""Simulated steps of plans, and the record of a pipeline that a plan carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.plan import Pipeline, PipelineTransfer, PipelineValue, PipelineWork, Plan
from autopar.schedule import (
    NONE,
    Dataflow,
    Program,
    Send,
    Table,
    ValueSpec,
    Work,
    WorkSpec,
    build,
    get,
    parse_table,
    to_text,
)
from autopar.schedule.without_flush.schedules import flushes
from autopar.simulate.durations import Durations
from autopar.simulate.engine import run, steady
from autopar.simulate.event import Memory
from autopar.simulate.memory import lasting_bytes, memory_of_tasks
from autopar.simulate.passes import Route
from autopar.simulate.timeline import Timeline


def simulate(plan: Plan, depth: int | None = None) -> Timeline:
    """Simulates a step of ``plan``: tasks and sends over time, and memory.

    A plan of one stage that was made here, or saved with its details, also has its operators and collectives by
    resource and memory by kind; `Timeline.save` writes them for Perfetto.

    Of a schedule without a flush it is a call of a full pipeline, see `steady`. A plan with one stage is one
    worker that runs its microbatches one after the other.

    Args:
        plan: a plan; those with several stages carry a record of their pipeline.
        depth: values between two workers that were sent and not yet received; None for any number.

    Raises:
        PlanMismatchError: the plan has several stages and no such record.
        ScheduleError: its schedule cannot run.
    """
    if not flushes(plan.schedule):
        table, dataflow, durations = parts_of(plan)
        stages = dict(enumerate(plan.stages))
        peaks = [max(t.during_bytes for t in memory_of_tasks(stages, table, w)) for w in range(table.num_workers)]
        return replace(steady(table, dataflow, durations), memory=tuple(((0.0, peak),) for peak in peaks))
    program, durations = program_of(plan)
    timeline = run(program, durations, depth)
    if plan.num_stages == 1:
        timeline = replace(timeline, slices=plan.details.slices, kinds=plan.details.memory)
    if plan.content.pipeline is None or program.table.num_stages != plan.num_stages:
        return timeline  # what the record's values take
    return replace(timeline, memory=_memory(plan, program.table, timeline))


def _memory(plan: Plan, table: Table, timeline: Timeline) -> tuple[Memory, ...]:
    """Bytes a device of each worker over time, as the plan counts them: the most of them is its peak."""
    stages = dict(enumerate(plan.stages))
    memories: list[Memory] = []
    for worker in range(table.num_workers):
        stages_of_worker = [stages[s] for s in table.stages_of_worker(worker)]
        line = [(0.0, sum(lasting_bytes(s) - s.accumulation_bytes for s in stages_of_worker))]
        passes = [e for e in timeline.computing(worker) if e.microbatch != NONE]
        for event, task in zip(passes, memory_of_tasks(stages, table, worker), strict=True):
            for time, size in ((event.start_s, task.during_bytes), (event.end_s, task.after_bytes)):
                if line[-1][1] != size:
                    line.append((time, size))
        memories.append(tuple(line))
    return tuple(memories)


def program_of(plan: Plan) -> tuple[Program, Durations]:
    """The instruction lists of a plan with the predicted durations of what they do.

    Raises:
        PlanMismatchError: the plan has several stages and no record of its pipeline.
        ScheduleError: its schedule cannot run.
    """
    table, dataflow, durations = parts_of(plan)
    return build(table, dataflow), durations


def parts_of(plan: Plan) -> tuple[Table, Dataflow, Durations]:
    """Schedule table, dataflow and durations of a plan. PlanMismatchError where it has no record of its pipeline."""
    record = plan.content.pipeline
    if record is not None:
        return from_record(record)
    if plan.num_stages != 1:
        raise PlanMismatchError(
            f"the plan has {plan.num_stages} stages and no record of its pipeline",
            cause="it was made by a search or a version of autopar that writes none",
            remedy="plan again with this version",
        )
    return _one_stage(plan)


def _one_stage(plan: Plan) -> tuple[Table, Dataflow, Durations]:
    """The whole step as forwards of one stage."""
    count = max(1, plan.num_microbatches)
    memory = plan.stages[0].memory
    lasting = memory.parameters + memory.optimizer + memory.batch
    state = ValueSpec("state", lasting, "step", stages=(0,))
    step = WorkSpec(Work("forward", 0), ("state",), temporaries_bytes=memory.total - lasting)
    durations = Durations({step.work: plan.stages[0].step_time / count})
    return get("inference").table(1, count), Dataflow((step,), (state,)), durations


def from_record(record: Pipeline) -> tuple[Table, Dataflow, Durations]:
    """Schedule table, dataflow and durations that a plan records."""
    works = tuple(
        WorkSpec(Work(w.kind, w.stage, w.part), w.reads, w.writes, w.accumulates, w.temporaries_bytes, w.aliases)
        for w in record.works
    )
    values = tuple(
        ValueSpec(v.name, v.bytes, v.lifetime, v.reduce, v.stages, v.donated, v.result, v.host) for v in record.values
    )
    durations = Durations(
        {Work(w.kind, w.stage, w.part): w.seconds for w in record.works},
        {(t.value, t.source, t.target): t.seconds for t in record.transfers},
        host_s={v.name: v.host_seconds for v in record.values if v.host},
    )
    return parse_table(record.table), Dataflow(works, values), durations


def routes_of(program: Program) -> list[Route]:
    """Values that workers send each other by instruction lists, sorted."""
    sends = ((w.worker, i) for w in program.workers for i in w.instructions if isinstance(i, Send))
    return sorted({(i.value.value, worker, i.to) for worker, i in sends})


def record_of(table: Table, dataflow: Dataflow, durations: Durations, routes: Iterable[Route]) -> Pipeline:
    """The record that a plan carries of its pipeline; `parts_of` reads it back.

    Args:
        table: tasks of each worker.
        dataflow: reads and writes of the works.
        durations: seconds of works and transfers.
        routes: values that workers send each other, from `routes_of`.
    """
    works = tuple(
        PipelineWork(
            s.work.kind, s.work.stage, float(durations.of_work(s.work)), s.work.part, s.reads, s.writes,
            s.accumulates, s.aliases, s.temporaries_bytes,
        )
        for s in dataflow.works
    )  # fmt: skip
    values = tuple(
        PipelineValue(
            v.name, v.bytes, v.lifetime, v.reduce, v.stages, v.donated, v.result, v.host,
            float(durations.of_host(v.name)),
        )
        for v in dataflow.values
    )  # fmt: skip
    transfers = (PipelineTransfer(*route, float(durations.of_transfer(*route))) for route in routes)
    return Pipeline(to_text(table), works, values, tuple(t for t in transfers if t.seconds))
