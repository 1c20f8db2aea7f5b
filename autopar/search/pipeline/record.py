"""The pipeline of a plan as works and values, from the plans of its stages; work on all examples between its passes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost import CostModel, send_s
from autopar.ir import Graph
from autopar.ir.analysis import names_read
from autopar.microbatch import AXIS, Joined, Microbatching
from autopar.plan import Pipeline, PlanContent, Stage
from autopar.schedule import Dataflow, Table, ValueRef, ValueSpec, Work, WorkSpec, build, check_dataflow, check_table
from autopar.schedule.dataflow import RefKind
from autopar.schedule.without_flush.schedules import flushes
from autopar.search.source import Sliced
from autopar.simulate import Durations, is_plain, record_of, routes_of, run, steady, step_of
from autopar.simulate.memory import passing_bytes
from autopar.stages import StageParts


def pipeline_of(
    graph: Graph, sliced: Sliced, parts: Sequence[PlanContent], table: Table, cost: CostModel
) -> tuple[Dataflow, Durations]:
    """Reads, writes and seconds of the works of a pipeline.

    Args:
        graph: the whole step.
        sliced: its stages.
        parts: the plan of each stage.
        table: the schedule.
        cost: what things cost on all devices.
    """
    cluster = cost.cluster
    works: list[WorkSpec] = []
    values: dict[str, ValueSpec] = {}
    seconds: dict[Work, float] = {}
    transfers: dict[tuple[str, int, int], float] = {}
    host_s: dict[str, float] = {}
    count = table.num_microbatches
    bytes_of = _microbatch_bytes(graph, sliced)
    for p, content in zip(sliced.parts, parts, strict=True):
        stage, s = content.stages[0], p.stage
        state, activations, stash, gradients = _own_values(s)
        times = dict(stage.work_times)
        if stage.form.activations_offloaded:
            host_s[activations] = cost.host_s(stage.activation_bytes)
        # A value of a later stage's forward is for the backward pass here.
        forward = [r.name for r in p.received if not r.backward and r.source < s]
        cotangents = [r.name for r in p.received if r.backward or r.source > s]
        sent_back = [n for n in p.sent if sliced_backward(graph, sliced, n)]
        sent_on = [n for n in p.sent if n not in set(sent_back)]
        meeting = StageMeeting(graph, p, stage, sliced.map.microbatching)
        values.update((v.name, v) for v in (*_stage_values(p, stage, table, bytes_of), *meeting.values()))
        temporaries = passing_bytes(stage)
        # What is added to accumulated gradients is a result, which comes into being while the rest is given up.
        besides = max(0, temporaries - stage.accumulation_bytes)
        trains = any(t.kind == "backward" for row in table.rows for t in row)
        joined = meeting.terms if trains else (gradients,)  # without a backward pass what is joined are results
        writes = (activations, *sent_on)
        works.append(WorkSpec(Work("forward", s), (state, *forward), writes, joined, temporaries))
        backward_s = times.get("backward", 0.0) / count
        backward = Work("backward", s)
        reads = (state, activations, *forward, *cotangents, *meeting.taken)
        if table.splits_backward:
            works.append(WorkSpec(backward, reads, (*sent_back, stash)))
            weight = Work("weight", s)
            works.append(WorkSpec(weight, (activations, stash), (), (gradients,), temporaries_bytes=besides))
            weight_s = times.get("weight", 0.0) / count
            seconds[backward], seconds[weight] = max(0.0, backward_s - weight_s), weight_s
        elif trains:
            works.append(WorkSpec(backward, reads, tuple(sent_back), (gradients,), besides))
            seconds[backward] = backward_s
        seconds |= meeting.seconds()
        update = Work("update", s)
        works += [*meeting.works(), WorkSpec(update, (state, gradients))]
        seconds[Work("forward", s)] = times.get("forward", 0.0) / count
        seconds[update] = times.get("update", 0.0) + _late_s(graph, p, table, parts, cluster)
    for p in sliced.parts:
        transfers |= _transfers(graph, p, table, bytes_of, parts, cluster)
    if cost.awaited_share:
        _await_sends(works, table, seconds, transfers, cost.awaited_share)
    return Dataflow(tuple(works), tuple(values.values())), Durations(seconds, transfers, host_s=host_s)


def _await_sends(
    works: Iterable[WorkSpec],
    table: Table,
    seconds: dict[Work, float],
    transfers: dict[tuple[str, int, int], float],
    share: float,
) -> None:
    """Counts a share of the seconds of each transfer with the pass that makes the value, whose worker awaits it.

    Args:
        works: of all stages.
        table: the schedule.
        seconds: of the works; changed.
        transfers: seconds by value and workers; changed.
        share: of a transfer, 0 to 1.
    """
    by_value: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for route in sorted(transfers):
        by_value[route[0]].append(route)
    for spec in works:
        workers = max(1, len(table.workers_of_stage(spec.work.stage)))
        for route in (r for name in spec.writes for r in by_value.get(name, ())):
            seconds[spec.work] += share * transfers[route] / workers
            transfers[route] *= 1 - share


def _stage_values(part: StageParts, stage: Stage, table: Table, bytes_of: Mapping[str, float]) -> Iterator[ValueSpec]:
    """Values that a stage keeps and sends, with bytes a device."""
    state, activations, stash, gradients = _own_values(part.stage)
    yield ValueSpec(state, stage.state_bytes, "step", stages=(part.stage,))
    yield ValueSpec(activations, stage.activation_bytes, "microbatch", host=stage.form.activations_offloaded)
    yield ValueSpec(gradients, stage.accumulation_bytes, "accumulator", reduce="sum")
    for name in part.sent:
        yield ValueSpec(name, math.ceil(bytes_of[name] / len(stage.devices)), "microbatch")
    if table.splits_backward:
        yield ValueSpec(stash, stage.weight_stash_bytes, "microbatch")


def step_record(table: Table, dataflow: Dataflow, durations: Durations) -> tuple[float, Pipeline]:
    """Seconds of a step, and what a plan records of its pipeline.

    Raises:
        ScheduleError: the table cannot run.
    """
    if not flushes(table.name):
        period_s = steady(table, dataflow, durations).step_time
        return period_s, record_of(table, dataflow, durations, routes_of(build(table, dataflow)))
    if is_plain(dataflow) and not table.after:
        check_table(table)
        check_dataflow(table, dataflow)
        step = step_of(table, dataflow, durations)
        return step.seconds, record_of(table, dataflow, durations, step.routes)
    program = build(table, dataflow)
    return run(program, durations).step_time, record_of(table, dataflow, durations, routes_of(program))


def _own_values(stage: int) -> list[str]:
    """Names of the values that stand for all state, activations, stashes and gradients of a stage."""
    kinds: tuple[RefKind, ...] = ("state", "activations", "stash", "gradients")
    return [str(ValueRef(kind, stage=stage)) for kind in kinds]


def sliced_backward(graph: Graph, sliced: Sliced, name: str) -> bool:
    """Whether a value of the loop is made in the backward pass."""
    return graph.producers[name].id in sliced.map.backward


def _microbatch_bytes(graph: Graph, sliced: Sliced) -> dict[str, float]:
    """Bytes of one microbatch's copy of every value that crosses stages."""
    microbatching = sliced.map.microbatching
    sizes: dict[str, float] = {}
    for p in sliced.parts:
        for n in p.sent:
            op = graph.producers[n]
            nbytes = float(graph.types[n].nbytes)
            layouts = microbatching.results.get(op.id, ())
            names = [v.name for v in op.results]
            if layouts and AXIS in layouts[names.index(n)].axes:
                nbytes /= microbatching.count
            sizes[n] = nbytes
    return sizes


def _transfers(
    graph: Graph,
    p: StageParts,
    table: Table,
    bytes_of: Mapping[str, float],
    parts: Sequence[PlanContent],
    cluster: Cluster,
) -> dict[tuple[str, int, int], float]:
    """Seconds of what stage ``p`` receives: its bytes over the links of the sending stage's devices."""
    seconds: dict[tuple[str, int, int], float] = {}
    received = [(r.name, r.source, bytes_of[r.name]) for r in p.received]
    received += [(met_name(r.name), r.source, float(graph.types[r.name].nbytes)) for r in p.received_met]
    for name, stage, nbytes in received:
        for source in table.workers_of_stage(stage):
            for target in table.workers_of_stage(p.stage):
                if source != target:
                    seconds[name, source, target] = transfer_s(cluster, nbytes, parts[stage], parts[p.stage])
    return seconds


def _late_s(graph: Graph, p: StageParts, table: Table, parts: Sequence[PlanContent], cluster: Cluster) -> float:
    """Seconds in which stage ``p`` gets what others send it after the loop, as if nothing overlapped with it.

    These are gradients made on another stage than the parameter's, terms of tied parameters, and global norms.
    """
    return sum(
        transfer_s(cluster, float(graph.types[r.name].nbytes), parts[r.source], parts[p.stage])
        for r in p.received_late
        if not set(table.workers_of_stage(r.source)) & set(table.workers_of_stage(p.stage))
    )


def transfer_s(cluster: Cluster, nbytes: float, source: PlanContent, target: PlanContent) -> float:
    """Seconds of sending a value of ``nbytes`` from one stage to another, each device sending its share."""
    return send_s(cluster, nbytes, source.stages[0].devices, target.stages[0].devices)


def met_name(name: str) -> str:
    """Name in the record of a value that is sent where examples meet."""
    return str(ValueRef("met", name))


@dataclass(frozen=True)
class StageMeeting:
    """A stage's work where examples meet; empty where it has no part in it.

    Args:
        graph: the whole step.
        part: what the stage does.
        stage: its plan.
        microbatching: the microbatches of the step.
    """

    graph: Graph
    part: StageParts
    stage: Stage
    microbatching: Microbatching

    @property
    def joined(self) -> tuple[Joined, ...]:
        """Values of microbatches that the stage brings."""
        read = self._read_by(self.microbatching.between)
        return tuple(j for j in self.part.joined if j.name in read)

    @property
    def terms(self) -> tuple[str, ...]:
        """The value that stands for all of them; none where there are none."""
        return (str(ValueRef("terms", stage=self.part.stage)),) if self.joined else ()

    @property
    def taken(self) -> tuple[str, ...]:
        """Values that the backward passes of the stage read."""
        read = self._read_by(self.part.body)
        return tuple(met_name(r.name) for r in self.part.received_met if r.name in read)

    def values(self) -> Iterator[ValueSpec]:
        """Its operands and results, with bytes a device."""
        devices, count, types = len(self.stage.devices), self.microbatching.count, self.graph.types
        for name in self.terms:
            # A microbatch brings its piece of what is stacked, and a term as large as all of what is added up.
            stacked = sum(types[j.name].nbytes for j in self.joined if not j.layout.partial) / count
            added = sum(types[j.name].nbytes for j in self.joined if j.layout.partial)
            nbytes = math.ceil((stacked + added) / devices)
            yield ValueSpec(name, nbytes, "accumulator", reduce="concatenate" if stacked > added else "sum")
        for n in self.part.sent_met:
            yield ValueSpec(met_name(n), math.ceil(types[n].nbytes / devices), "step")

    def works(self) -> list[WorkSpec]:
        """Its works, by part."""
        part_of = {id: self.part.part_of[id] for id in self.part.between}
        here = {v.name: part_of[id] for id in part_of for v in self.graph.by_id[id].results}
        at = {n: here.get(n, 0) for n in self.part.sent_met}
        numbers = sorted({*at.values(), *part_of.values()})
        works = []
        for k in numbers:
            read = self._read_by(id for id, n in part_of.items() if n == k)
            names = [r.name for r in self.part.received_met if r.name in read and r.name not in here]
            terms = self.terms if k == numbers[0] else ()
            written = [n for n in self.part.sent_met if at[n] == k]
            reads = (*terms, *map(met_name, names))
            works.append(WorkSpec(Work("meeting", self.part.stage, k), reads, tuple(map(met_name, written))))
        return works

    def seconds(self) -> dict[Work, float]:
        """Seconds of its works: of the last, which has everything, all of them."""
        works = [spec.work for spec in self.works()]
        return {work: dict(self.stage.work_times).get("meeting", 0.0) if work == works[-1] else 0.0 for work in works}

    def _read_by(self, ids: Iterable[str]) -> set[str]:
        return names_read(self.graph.by_id[id] for id in ids)
