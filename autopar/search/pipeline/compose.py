"""`compose`: the plan of a pipeline from the plans of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autopar.ir import Layout
from autopar.ir.fingerprint import fingerprint
from autopar.plan import (
    Communication,
    InputPart,
    InputRecord,
    OutputRecord,
    Pipeline,
    Plan,
    PlanContent,
    SearchContent,
)
from autopar.schedule import Table
from autopar.search.bound import Freedom, bounded
from autopar.search.pipeline.candidates import (
    Candidate,
)
from autopar.search.pipeline.memory import most_bytes, with_in_flight
from autopar.search.pipeline.record import pipeline_of, step_record
from autopar.search.problem import Problem
from autopar.search.source import Sliced
from autopar.solver.meter import Work


def compose(problem: Problem, candidate: Candidate, sliced: Sliced, parts: Sequence[PlanContent], table: Table) -> Plan:
    """The plan of all stages together; ``parts`` are theirs, on their devices."""
    graph = problem.graph
    problem.meter.add(Work.SCHEDULED, len(parts) * candidate.count)
    problem.spend()  # many stages in many microbatches take as long as planning them
    seconds, record = step_record(table, *pipeline_of(graph, sliced, parts, table, problem.cost_model))
    placed = [_with_sends(c, i, record, candidate.count, sliced) for i, c in enumerate(parts)]
    inputs, outputs = _records(problem, sliced, parts)
    content = PlanContent(
        program=graph.name,
        fingerprint=fingerprint(graph),
        cluster=problem.cluster.to_json(),
        cluster_name=str(problem.cluster),
        step_time=seconds,
        peak_memory=most_bytes(parts, sliced, table),
        num_microbatches=candidate.count,
        schedule=table.name,
        stages=tuple(with_in_flight([c.stages[0] for c in placed], parts, sliced, table)),
        inputs=inputs,
        outputs=outputs,
        operators=(),
        copies=(),
        choices=tuple(msgspec.structs.replace(x, stage=i) for i, c in enumerate(parts) for x in c.choices),
        search=SearchContent(parts[0].search.strategy, seconds, None),
        notes=tuple(dict.fromkeys([*(n for c in parts for n in c.notes), *_barrier(sliced)])),
        memory_limit=problem.memory_limit_bytes,
        donated=tuple(i.name for i in graph.inputs if i.name in problem.job.donated),
        pipeline=msgspec.structs.replace(record, members=candidate.members) if table.after else record,
        cuts=() if table.after else tuple(m[-1] for m in candidate.members[:-1]),
        parts=tuple(on_devices(c, 0, (0, len(c.stages[0].devices))) for c in parts),
    )
    plan = bounded(Plan(content), problem, Freedom.of(problem))
    problem.offer(plan)
    return plan


def _barrier(sliced: Sliced) -> list[str]:
    """Note on meetings of examples, if there are any."""
    if not sliced.map.microbatching.between:
        return []
    return ["examples meet: all forward passes run first, then what needs all microbatches, then all backward passes"]


def on_devices(content: PlanContent, stage: int, placement: tuple[int, int]) -> PlanContent:
    """A stage's plan with its devices' numbers in the cluster and its own number."""
    planned = content.stages[0]
    placed = msgspec.structs.replace(
        planned,
        devices=tuple(range(placement[0], placement[0] + placement[1])),
        collectives=tuple(msgspec.structs.replace(c, stage=stage) for c in planned.collectives),
    )
    return msgspec.structs.replace(content, stages=(placed,))


def _with_sends(content: PlanContent, stage: int, record: Pipeline, count: int, sliced: Sliced) -> PlanContent:
    """A stage's plan with what it sends to other stages among its communication."""
    planned = content.stages[0]
    whole_bytes = {v.name: v.bytes * len(planned.devices) for v in record.values}
    sends = [
        Communication("send", whole_bytes[t.value], "stages", float(count), stage, count * t.seconds)
        for t in record.transfers
        if t.value in sliced.parts[stage].sent
    ]
    works = (*sliced.map.body.items(), *sliced.map.update.items())
    sending = msgspec.structs.replace(
        planned,
        collectives=(*planned.collectives, *sends),
        operators=tuple(id for id, stages in works if stage in stages),
    )
    return msgspec.structs.replace(content, stages=(sending,))


def _whole(rank: int) -> InputPart:
    """All of an input that no stage reads, on the first stage."""
    return InputPart(0, str(Layout.replicated(rank)))


def _records(
    problem: Problem, sliced: Sliced, parts: Sequence[PlanContent]
) -> tuple[tuple[InputRecord, ...], tuple[OutputRecord, ...]]:
    """Records of the step's inputs, on all stages that have them, and of its outputs."""
    graph = problem.graph
    held: dict[str, list[InputPart]] = {}
    returned: dict[int, tuple[int, str]] = {}
    for p, content in zip(sliced.parts, parts, strict=True):
        values = {str(v): v for v in p.graph_inputs}
        for r in content.inputs:
            value = values[r.path]
            if value.kind in ("step", "piece") and value.name in sliced.map.inputs:
                held.setdefault(value.name, []).append(InputPart(p.stage, r.layout, r.memory))
        for index, record in zip(p.outputs, content.outputs, strict=False):
            returned[index] = (p.stage, record.layout)
    inputs = tuple(
        InputRecord.in_parts(i.name, str(i.type), i.role, held.get(i.name) or [_whole(i.type.rank)])
        for i in graph.inputs
    )
    outputs = tuple(
        OutputRecord(o.path, str(o.type), returned[n][1], o.updates, returned[n][0])
        for n, o in enumerate(graph.outputs)
    )
    return inputs, outputs
