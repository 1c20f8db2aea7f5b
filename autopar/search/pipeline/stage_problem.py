"""A stage as a problem of its own: its graph, its devices, and the memory that microbatches in flight leave it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.errors.names import counted
from autopar.ir import Graph
from autopar.plan import StepForm
from autopar.plan.text import bytes_text
from autopar.schedule import Table
from autopar.schedule.offload import IN_TRANSFER
from autopar.search.anytime import OfParts
from autopar.search.constraints import Constraint
from autopar.search.pipeline.memory import received_bytes
from autopar.search.problem import Problem
from autopar.search.source import Sliced, StageSource
from autopar.sharding.padding import renamed_dims


@dataclass(frozen=True)
class ScheduledStages:
    """A stage that is to be planned.

    Args:
        problem: the whole.
        source: of its step.
        sliced: its stages.
        members: by stage the ids of its operators of the forward pass.
        layers: of the whole forward pass, by layer the ids of its operators; empty where each stage is one.
        table: the schedule.
        together: whether each stage is planned with room for the other stages of its worker, which are taken to be
            like it.
    """

    problem: Problem
    source: StageSource
    sliced: Sliced
    members: tuple[tuple[str, ...], ...]
    layers: tuple[tuple[str, ...], ...]
    table: Table
    together: bool = False

    def first(self, stage: int) -> int:
        """The first stage that is like a stage but for names."""
        return self.sliced.isomorphic[stage] if self.sliced.isomorphic else stage

    def other_stages(self, stage: int) -> int:
        """Stages of the worker of a stage that it is planned with room for."""
        workers = self.table.workers_of_stage(stage) if self.together else ()
        return max((len(self.table.stages_of_worker(w)) for w in workers), default=1) - 1

    def in_flight(self, stage: int) -> int:
        """Most microbatches in flight on a stage, or on all stages of its worker that it is planned with room for."""
        if not self.other_stages(stage):
            return in_flight(self.table, stage)
        return max(
            _in_flight(self.table, w, self.table.stages_of_worker(w)) for w in self.table.workers_of_stage(stage)
        )

    def layers_of(self, stage: int) -> tuple[tuple[str, ...], ...]:
        """The layers of a stage, cut where the stage is cut."""
        operators = set(self.members[stage])
        layers = [tuple(id for id in layer if id in operators) for layer in self.layers]
        return tuple(layer for layer in layers if layer) or (self.members[stage],)

    def named(self, form: StepForm, stage: int, other: int) -> StepForm:
        """A form of a stage by the names that values have in another one, which is like it."""
        if not form.padded or stage == other:
            return form
        inputs = zip(self.sliced.graphs[stage].inputs, self.sliced.graphs[other].inputs, strict=True)
        return structs.replace(form, padded=renamed_dims(form.padded, {i.name: j.name for i, j in inputs}))

    def of_stage(self, stage: int, form: StepForm) -> StepForm:
        """A form with the ends of the layers of a stage, where something is recomputed."""
        ends = None if form.remat == "none" else tuple(layer[-1] for layer in self.layers_of(stage)[:-1])
        return structs.replace(form, layer_ends=ends)


@dataclass(frozen=True)
class PlacedStage:
    """A stage of a pipeline on its devices.

    Args:
        pipeline: what is planned.
        stage: its number.
        placement: its first device and the number of devices.
    """

    pipeline: ScheduledStages
    stage: int
    placement: tuple[int, int]

    @property
    def part(self) -> Cluster:
        """Its devices."""
        return self.pipeline.problem.cluster.part(*self.placement)

    @property
    def cost_model(self) -> CostModel:
        """Cost model of its devices."""
        return self.pipeline.problem.cost_model.on(self.part)


def in_flight(table: Table, stage: int) -> int:
    """Most microbatches whose forward pass a stage has done and whose backward pass it has not."""
    return max(1, *(_in_flight(table, worker, (stage,)) for worker in table.workers_of_stage(stage)))


def _in_flight(table: Table, worker: int, stages: Collection[int]) -> int:
    most = held = 0
    for task in table.rows[worker]:
        if task.stage in stages:
            held += {"forward": 1, "backward": 0 if table.splits_backward else -1, "weight": -1}[task.kind]
            most = max(most, held)
    return most


@dataclass(frozen=True)
class StageProblem:
    """A stage as a problem of its own.

    Args:
        problem: to be planned on the stage's devices, within what they leave it: of the first stage that is like it.
        graph: of the stage itself.
        form: with the ends of its layers.
        extra_in_flight: microbatches in flight besides the one that runs.
        whole_bytes: of a device.
    """

    problem: Problem
    graph: Graph
    form: StepForm
    extra_in_flight: int
    whole_bytes: int


def stage_problem(
    placed: PlacedStage, form: StepForm, shape: tuple[int, ...] | None, cutoff_s: float = math.inf
) -> StageProblem:
    """A stage in a form as a problem. InfeasiblePlanError where what others send it fills its devices."""
    pipeline, stage, part = placed.pipeline, placed.stage, placed.part
    problem, table, (planned, of_stage) = pipeline.problem, pipeline.table, _with_first(pipeline, stage, form)
    extra, others = pipeline.in_flight(stage) - 1, pipeline.other_stages(stage)
    received = extra * received_bytes(pipeline.sliced, stage, placed.placement[1])
    whole = problem.job.memory_limit_bytes or part.memory_bytes
    limit = whole - received
    if limit <= 0:
        raise _too_little(stage, extra, received, whole)
    job = replace(
        problem.job,
        memory_limit_bytes=limit,
        num_microbatches=table.num_microbatches,
        num_stages=1,
        schedule="auto",
        mesh_shape=shape,
        remat="none",
        offload="update" if form.host_update else problem.job.offload,
        constraints=planned.constraints,
    )
    subproblem = replace(
        problem.subproblem,
        extra_in_flight=min(extra, IN_TRANSFER) if form.activations_offloaded else extra,
        separate_programs=True,
        arriving=pipeline.sliced.arriving(planned.stage),
        met=pipeline.sliced.met(planned.stage),
        cutoff_s=cutoff_s,
        other_stages=others,
    )
    # What would do for one stage need not do for the others.
    reporting = replace(problem.reporting, explains_infeasible=False)
    planned_problem = replace(
        problem,
        graph=planned.graph,
        cluster=part,
        cost_model=placed.cost_model,
        job=job,
        source=None,
        subproblem=subproblem,
        reporting=reporting,
        anytime=None if problem.anytime is None else OfParts(problem.anytime),
    )
    return StageProblem(planned_problem, of_stage.graph, of_stage.form, extra, whole)


def graph_in_form(pipeline: ScheduledStages, stage: int, form: StepForm) -> tuple[Graph, StepForm]:
    """The graph of a stage in a form, and the form with the ends of its layers.

    Args:
        pipeline: what is planned.
        stage: its number.
        form: the form.
    """
    of_stage = _stage_graph(pipeline, stage, form)
    return of_stage.graph, of_stage.form


def first_graph(pipeline: ScheduledStages, stage: int, form: StepForm) -> tuple[Graph, Graph]:
    """The graph of the first stage that is like a stage in a form but for names, and that of the stage itself.

    Args:
        pipeline: what is planned.
        stage: its number.
        form: the form.
    """
    planned, of_stage = _with_first(pipeline, stage, form)
    return planned.graph, of_stage.graph


@dataclass(frozen=True)
class _StageGraph:
    """The graph of a stage in a form.

    Args:
        stage: its number.
        graph: of it.
        constraints: on its inputs.
        kind: equal for stages whose graphs differ in names alone.
        form: with the ends of its layers.
    """

    stage: int
    graph: Graph
    constraints: tuple[Constraint, ...]
    kind: tuple[object, ...]
    form: StepForm


def _with_first(pipeline: ScheduledStages, stage: int, form: StepForm) -> tuple[_StageGraph, _StageGraph]:
    """The first stage that is like a stage in a form but for names, and the stage itself."""
    of_stage, first = _stage_graph(pipeline, stage, form), pipeline.first(stage)
    like = _stage_graph(pipeline, first, pipeline.named(form, stage, first))
    return like if like.kind == of_stage.kind else of_stage, of_stage


def _stage_graph(pipeline: ScheduledStages, stage: int, form: StepForm) -> _StageGraph:
    form = pipeline.of_stage(stage, form)
    graph = pipeline.sliced.graphs[stage]
    if form.changes_stage:
        graph = pipeline.source.in_form(pipeline.members, stage, form).graph
    at = {id: n for n, id in enumerate(pipeline.members[stage])}
    layers = tuple(tuple(at[id] for id in layer) for layer in pipeline.layers_of(stage))
    constraints = pipeline.sliced.constraints(stage, pipeline.problem.job.constraints)
    first = pipeline.first(stage)
    unnamed = structs.replace(pipeline.named(form, stage, first).of_graph, layer_ends=None)
    kind = (first, unnamed, layers, _asked_of(graph, constraints))
    return _StageGraph(stage, graph, constraints, kind, form)


def _asked_of(graph: Graph, constraints: Sequence[Constraint]) -> tuple[object, ...]:
    """Constraints by the numbers of inputs, whatever their names."""
    number = {i.name: n for n, i in enumerate(graph.inputs)}
    return tuple((number[c.value], c.shards, c.axes) for c in constraints)


def _too_little(stage: int, extra: int, needed: int, limit: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {stage} is sent {bytes_text(needed)} ({needed} bytes) a device by others for "
        f"{counted(extra, 'microbatch')} in flight; the limit is {bytes_text(limit)}",
        cause="what the backward pass takes from other stages is held for all microbatches in flight",
        remedy="more stages, more and smaller microbatches, or schedule='1f1b'",
    )
