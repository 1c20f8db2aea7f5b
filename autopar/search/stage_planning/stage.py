"""The plan of one chosen stage: its sharding, and what it recomputes where memory is short."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph
from autopar.plan import PlanContent
from autopar.plan.text import bytes_text
from autopar.recompute import LEVELS, Level
from autopar.schedule import Table
from autopar.schedule.offload import IN_TRANSFER
from autopar.search.constraints import Constraint
from autopar.search.intra.host import share_bytes
from autopar.search.problem import Problem
from autopar.search.source import Recomputation, Sliced, StageSource
from autopar.search.stage_planning.memory import received_bytes, stage_bytes
from autopar.search.stage_planning.shared import StagePlanner
from autopar.search.trials import Trials


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
    """

    problem: Problem
    source: StageSource
    sliced: Sliced
    members: tuple[tuple[str, ...], ...]
    layers: tuple[tuple[str, ...], ...]
    table: Table

    def first(self, stage: int) -> int:
        """The first stage that is like a stage but for names."""
        return self.sliced.isomorphic[stage] if self.sliced.isomorphic else stage

    def recomputation(self, stage: int, level: Level) -> Recomputation:
        """What ``level`` means for a stage: its layers, cut where the stage is cut."""
        operators = set(self.members[stage])
        layers = [tuple(id for id in layer if id in operators) for layer in self.layers]
        return Recomputation(level, tuple(layer for layer in layers if layer) or (self.members[stage],))


def levels_of(problem: Problem) -> tuple[Level, ...]:
    """Levels of recomputation that may be taken."""
    asked = problem.options.remat
    return LEVELS if asked == "auto" else tuple(level for level in LEVELS if level == asked)


def in_flight(table: Table, stage: int) -> int:
    """Most microbatches whose forward pass a stage has done and whose backward pass it has not."""
    most = 0
    for worker in table.workers_of_stage(stage):
        held = 0
        for task in table.rows[worker]:
            if task.stage == stage:
                held += {"forward": 1, "backward": 0 if table.splits_backward else -1, "weight": -1}[task.kind]
                most = max(most, held)
    return max(1, most)


def plan_stage(pipeline: ScheduledStages, stage: int, placement: tuple[int, int], shared: StagePlanner) -> PlanContent:
    """The plan of one stage, within the memory that microbatches in flight leave.

    Nothing is recomputed where that fits as it would be without a limit, or for next to nothing more. Else the
    fastest of all levels that fit is taken, each also with microbatches that wait in host memory, where that may be.

    Args:
        pipeline: what is planned.
        stage: its number.
        placement: its first device and the number of devices.
        shared: plans one stage on its submesh.

    Raises:
        InfeasiblePlanError: no level fits.
    """
    shape, asked = _first_shape(pipeline, stage, placement, shared), _shape_asked_for(pipeline, placement)
    if shape != asked:
        with contextlib.suppress(InfeasiblePlanError):
            return _on_mesh(pipeline, stage, placement, shape, shared)
    return _on_mesh(pipeline, stage, placement, asked, shared)


def submit_stages(
    pipeline: ScheduledStages, order: Sequence[int], placements: Sequence[tuple[int, int]], shared: StagePlanner
) -> None:
    """Submits the first plan of each kind of stage to the pool of workers, which gets as far as it does.

    Args:
        pipeline: what is planned.
        order: in which stages are planned.
        placements: by stage its first device and the number of devices.
        shared: plans one stage on its submesh.
    """
    if shared.pool.process is None:
        return
    form = StageForm(levels_of(pipeline.problem)[0], False, pipeline.table.num_microbatches)
    starts = pipeline.problem.cluster.group_starts
    first: dict[tuple[object, ...], tuple[int, tuple[int, ...] | None]] = {}
    for stage in order:
        (begin, size), shape = placements[stage], _first_shape(pipeline, stage, placements[stage], shared)
        first.setdefault((pipeline.first(stage), size, bisect_right(starts, begin), shape), (stage, shape))
    for stage, shape in first.values() if len(first) > 1 else ():
        with contextlib.suppress(InfeasiblePlanError):  # raised where it is planned
            shared.submit(_stage_problem(pipeline, stage, placements[stage], form, shape).problem)


def _first_shape(
    pipeline: ScheduledStages, stage: int, placement: tuple[int, int], shared: StagePlanner
) -> tuple[int, ...] | None:
    """The shape of the logical mesh that a stage is planned on first; None for all of them."""
    asked = pipeline.problem.options.mesh_shape is not None or not shared.meshes
    return _shape_asked_for(pipeline, placement) if asked else shared.meshes[stage]


def _shape_asked_for(pipeline: ScheduledStages, placement: tuple[int, int]) -> tuple[int, ...] | None:
    asked = pipeline.problem.options.mesh_shape
    return asked if asked is not None and math.prod(asked) == placement[1] else None


def _on_mesh(
    pipeline: ScheduledStages,
    stage: int,
    placement: tuple[int, int],
    shape: tuple[int, ...] | None,
    shared: StagePlanner,
) -> PlanContent:
    """`plan_stage` on the logical mesh of a shape, or on all of them."""
    part, levels = pipeline.problem.cluster.part(*placement), levels_of(pipeline.problem)
    count = pipeline.table.num_microbatches
    negligible = pipeline.problem.policy.stages.negligible_cost

    def attempt(form: StageForm, cutoff_s: float, explain: bool) -> _PlannedForm:
        content, free = _at_level(pipeline, stage, placement, form, shape, shared, cutoff_s)
        return _PlannedForm(form, content, seconds_with_moves(content, pipeline.problem.cost_model.on(part)), free)

    trials = Trials(attempt)
    first, *more = (StageForm(level, False, count) for level in levels)
    offloaded = [StageForm(level, True, count) for level in levels] if may_offload_activations(pipeline, stage) else []

    updated = [replace(f, host_update=True) for f in (first, *more, *offloaded)] * may_update_on_hosts(pipeline)

    def forms() -> Iterator[StageForm]:
        # After the host, the smallest: where it does not fit, nothing does that stays on the device.
        tried = [first, *offloaded, *more[-1:]]
        yield from tried
        if len(trials.failures) < len(tried):
            yield from reversed(more[:-1])
        yield from updated

    def ends(planned: _PlannedForm) -> bool:
        return planned.form == first and (planned.free or limit_is_negligible(planned.content, negligible))

    plans = trials.run(forms(), seconds=lambda planned: planned.seconds, ends=ends)
    if not plans:
        raise trials.not_faster or [*trials.impossible.values(), *trials.failures.values()][-1]
    return min(plans, key=lambda planned: planned.seconds).content


@dataclass(frozen=True)
class StageForm:
    """A stage that recomputes and offloads some of its activations.

    Args:
        level: what is recomputed.
        activations_offloaded: whether activations of microbatches in flight lie in host memory.
        count: number of microbatches.
        host_update: whether hosts update the state that only the update reads, where nobody asked for that.
    """

    level: Level
    activations_offloaded: bool
    count: int
    host_update: bool = False

    def described(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        """``error`` as it is: it is one of several reasons why a slicing does not fit."""
        return error


@dataclass(frozen=True)
class _PlannedForm:
    """The plan of a form, its busy seconds a step, and whether the memory limit had no part in it."""

    form: StageForm
    content: PlanContent
    seconds: float
    free: bool


def limit_is_negligible(content: PlanContent, negligible: float) -> bool:
    """Whether the plan takes hardly longer than any would without a memory limit: other configurations do more work.

    Args:
        content: the plan.
        negligible: relative cost up to which it is hardly longer.
    """
    least = content.search.unlimited_s
    return least is not None and content.search.objective <= (1 + negligible) * least


def may_update_on_hosts(pipeline: ScheduledStages) -> bool:
    """Whether the planner may have hosts update the state of stages, by price."""
    problem = pipeline.problem
    return problem.options.offload == "auto" and all(g.host_bandwidth is not None for g in problem.cluster.groups)


def may_offload_activations(pipeline: ScheduledStages, stage: int) -> bool:
    """Whether what microbatches of a stage wait with may lie in host memory, and there are so many that it helps."""
    groups = pipeline.problem.cluster.groups
    return (
        pipeline.problem.options.offload != "none"
        and all(g.host_bandwidth is not None for g in groups)
        and in_flight(pipeline.table, stage) - 1 > IN_TRANSFER
    )


def seconds_with_moves(content: PlanContent, cost: CostModel) -> float:
    """Busy seconds a step of a stage, with what its microbatches' moves to the host take longer than the loop does."""
    planned = content.stages[0]
    if not planned.activations_offloaded:
        return content.step_time
    times = dict(planned.work_times)
    moves = 2 * content.num_microbatches * cost.host_s(planned.activation_bytes)
    return content.step_time + max(0.0, moves - times.get("forward", 0.0) - times.get("backward", 0.0))


def _at_level(
    pipeline: ScheduledStages,
    stage: int,
    placement: tuple[int, int],
    form: StageForm,
    shape: tuple[int, ...] | None,
    shared: StagePlanner,
    cutoff_s: float,
) -> tuple[PlanContent, bool]:
    """The plan in a form, and whether the limit had no part in it; it need not be found if it takes ``cutoff_s``."""
    stage_problem = _stage_problem(pipeline, stage, placement, form, shape, cutoff_s)
    options, extra = stage_problem.problem.options, stage_problem.problem.subproblem.extra_in_flight

    def planned(limit_bytes: int) -> tuple[PlanContent, int]:
        """The plan within a limit, and the bytes that the stage needs by it in all."""
        within = replace(stage_problem.problem, options=replace(options, memory_limit_bytes=limit_bytes))
        content = shared.plan(within, stage_problem.kind, f"stage {stage + 1} of {len(pipeline.members)}")
        content = content.in_form(form.level, stage_problem.ends)
        content = (
            _with_activations_offloaded(content, stage_problem.problem.cluster, stage_problem.extra_in_flight)
            if form.activations_offloaded
            else content
        )
        return content, stage_bytes(content, pipeline.sliced, pipeline.table, stage)

    limit = stage_problem.problem.memory_limit_bytes
    for _ in range(pipeline.problem.policy.stages.limit_attempts):
        content, needed = planned(max(1, limit))
        if needed <= stage_problem.whole_bytes:
            return content, not content.memory_bound
        # What is over has to come off what this plan needs itself, which may be less than it was allowed.
        limit = content.peak_memory + extra * content.stages[0].activation_bytes - (needed - stage_problem.whole_bytes)
    raise _over_limit(needed, pipeline, stage, stage_problem.whole_bytes)


@dataclass(frozen=True)
class _StageProblem:
    """A stage as a problem of its own.

    Args:
        problem: to be planned on the stage's devices, within what they leave it.
        kind: equal for stages whose graphs differ in names alone.
        ends: last operators of its layers but the last.
        extra_in_flight: microbatches in flight besides the one that runs.
        whole_bytes: of a device.
    """

    problem: Problem
    kind: tuple[object, ...]
    ends: tuple[str, ...]
    extra_in_flight: int
    whole_bytes: int


def _stage_problem(
    pipeline: ScheduledStages,
    stage: int,
    placement: tuple[int, int],
    form: StageForm,
    shape: tuple[int, ...] | None,
    cutoff_s: float = math.inf,
) -> _StageProblem:
    """A stage in a form as a problem. InfeasiblePlanError where what others send it fills its devices."""
    problem, table, level = pipeline.problem, pipeline.table, form.level
    recomputation = pipeline.recomputation(stage, level)
    graph = pipeline.sliced.graphs[stage]
    if level != "none":
        graph = pipeline.source.recomputed(table.num_microbatches, pipeline.members, stage, recomputation)
    part = problem.cluster.part(*placement)
    extra = in_flight(table, stage) - 1
    received = extra * received_bytes(pipeline.sliced, stage, placement[1])
    whole = problem.options.memory_limit_bytes or part.memory_bytes
    limit = whole - received
    if limit <= 0:
        raise _too_little(stage, extra, received, whole)
    options = replace(
        problem.options,
        memory_limit_bytes=limit,
        num_microbatches=table.num_microbatches,
        num_stages=1,
        schedule="auto",
        mesh_shape=shape,
        remat="none",
        offload="update" if form.host_update else problem.options.offload,
        constraints=pipeline.sliced.constraints(stage, problem.options.constraints),
    )
    subproblem = replace(
        problem.subproblem,
        extra_in_flight=min(extra, IN_TRANSFER) if form.activations_offloaded else extra,
        separate_programs=True,
        arriving=pipeline.sliced.arriving(stage),
        met=pipeline.sliced.met(stage),
        cutoff_s=cutoff_s,
    )
    # What would do for one stage need not do for the others.
    reporting = replace(problem.reporting, explains_infeasible=False)
    at = {id: n for n, id in enumerate(pipeline.members[stage])}
    layers = tuple(tuple(at[id] for id in layer) for layer in recomputation.layers)
    kind = (pipeline.first(stage), level, layers, form.host_update, _asked_of(graph, options.constraints))
    stage_problem = replace(
        problem,
        graph=graph,
        cluster=part,
        cost_model=problem.cost_model.on(part),
        options=options,
        source=None,
        subproblem=subproblem,
        reporting=reporting,
    )
    return _StageProblem(stage_problem, kind, tuple(layer[-1] for layer in recomputation.layers[:-1]), extra, whole)


def _asked_of(graph: Graph, constraints: Sequence[Constraint]) -> tuple[object, ...]:
    """Constraints by the numbers of inputs, whatever their names."""
    number = {i.name: n for n, i in enumerate(graph.inputs)}
    return tuple((number[c.value], c.shards, c.axes) for c in constraints)


def _with_activations_offloaded(content: PlanContent, part: Cluster, extra: int) -> PlanContent:
    """The plan with the activations of ``extra`` microbatches in host memory. InfeasiblePlanError if that is full."""
    planned = content.stages[0]
    needed, there = extra * planned.activation_bytes + planned.host_bytes, share_bytes(part)
    if needed > there:
        raise InfeasiblePlanError(
            f"{extra} microbatches in flight wait with {bytes_text(needed)} a device in host memory; "
            f"there is {bytes_text(there)}",
            remedy="more host_memory_bytes in the cluster file, or offload='none'",
        )
    return msgspec.structs.replace(content, stages=(msgspec.structs.replace(planned, activations_offloaded=True),))


def _over_limit(needed: int, pipeline: ScheduledStages, stage: int, limit: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {stage} needs {bytes_text(needed)} ({needed} bytes) a device with its microbatches in flight by "
        f"schedule {pipeline.table.name}; the limit is {bytes_text(limit)}",
        cause="gradients that are added up, and what waits for weight gradients, are there next to the rest",
        remedy="more stages, more and smaller microbatches, or schedule='1f1b'",
    )


def _too_little(stage: int, extra: int, needed: int, limit: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {stage} is sent {bytes_text(needed)} ({needed} bytes) a device by others for {extra} microbatches in "
        f"flight; the limit is {bytes_text(limit)}",
        cause="what the backward pass takes from other stages is held for all microbatches in flight",
        remedy="more stages, more and smaller microbatches, or schedule='1f1b'",
    )
