"""`plan_candidate`: the exact plan of one slicing of a step into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan import (
    Plan,
    PlanContent,
)
from autopar.plan.text import bytes_text
from autopar.schedule import Table
from autopar.search.composition.compose import compose, on_devices
from autopar.search.composition.schedules import (
    check_ends,
    fastest_table,
    fits,
)
from autopar.search.enumeration.candidates import (
    Candidate,
    schedule_for,
    table_for,
)
from autopar.search.parallel import SERIAL, WorkerPool
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.search.stage_planning.busy import BusyStages
from autopar.search.stage_planning.memory import limit_of_each, most_bytes
from autopar.search.stage_planning.shared import StagePlanCache, StagePlanner
from autopar.search.stage_planning.stage import plan_stage, submit_like, submit_stages
from autopar.search.stage_planning.stage_problem import ScheduledStages, in_flight


def plan_candidate(
    problem: Problem,
    source: StageSource,
    candidate: Candidate,
    intra: Callable[[Problem], Plan],
    pool: WorkerPool = SERIAL,
    cache: StagePlanCache | None = None,
    busy: BusyStages | None = None,
    cutoff_s: float = math.inf,
) -> Plan:
    """The exact plan of a candidate: every stage planned on its submesh, the whole simulated.

    Args:
        problem: the whole.
        source: of its step.
        candidate: stages and their devices.
        intra: plans one stage on its submesh.
        pool: plans some of them.
        cache: plans of stages of other candidates with the same stages; those that are made here are added.
        busy: what stages of other candidates take; those that are planned here are added.
        cutoff_s: seconds from which the plan is of no use.

    Raises:
        InfeasiblePlanError: a stage does not fit.
        ScheduleError: examples meet, and the schedule asked for has no moment for that.
        NotFasterError: stages that are planned show that it takes ``cutoff_s`` or more.
    """
    microbatching = source.microbatches(candidate.count)
    schedule = candidate.schedule or schedule_for(problem, microbatching)
    table = table_for(schedule, len(candidate.members), microbatching)
    source = source.with_stages_after(table.after)
    sliced = source.slice(candidate.count, candidate.members)
    check_ends(problem.graph, sliced, table)
    shared = StagePlanner(
        intra, candidate.meshes, pool, {} if cache is None else cache, any_that_fits=candidate.shares_plans
    )
    pipeline = ScheduledStages(problem, source, sliced, candidate.members, candidate.layers, table)
    parts = _planned_stages(pipeline, candidate, shared, busy or BusyStages(), cutoff_s)
    if not fits(problem, sliced, parts, table):  # each stage does, and some worker has several
        parts = _sharing(pipeline, candidate, shared, parts)
    if candidate.schedule is None and problem.options.schedule == "auto":
        table = fastest_table(problem, sliced, parts, table)
    return compose(problem, candidate, sliced, parts, table)


def _planned_stages(
    pipeline: ScheduledStages,
    candidate: Candidate,
    shared: StagePlanner,
    busy: BusyStages,
    cutoff_s: float = math.inf,
) -> list[PlanContent]:
    """The plan of every stage, on its devices. NotFasterError where the pipeline takes ``cutoff_s`` or more."""
    # With the fewest microbatches in flight first: what is best there is best for isomorphic stages that it fits too.
    sign = -1 if candidate.shares_plans else 1
    order = sorted(range(len(candidate.members)), key=lambda i: (sign * in_flight(pipeline.table, i), i))
    keys = {}
    if cutoff_s < math.inf and not pipeline.table.after:
        cluster, count = pipeline.problem.cluster, candidate.count
        keys = {i: busy.key(pipeline.sliced.graphs[i], cluster.part(*candidate.devices[i]), count) for i in order}
        busy.check(keys, cutoff_s)
    submit_stages(pipeline, order, candidate.devices, shared)
    contents: dict[int, PlanContent] = {}
    for n, i in enumerate(order):
        contents[i] = plan_stage(pipeline, i, candidate.devices[i], shared)
        if not candidate.shares_plans and all(pipeline.first(j) != pipeline.first(i) for j in order[:n]):
            isomorphic = [j for j in order[n + 1 :] if pipeline.first(j) == pipeline.first(i)]
            submit_like(pipeline, contents[i], isomorphic, candidate.devices, shared)
        if keys:
            busy.add(keys[i], contents[i])
            busy.check(keys, cutoff_s)
    return [on_devices(contents[i], i, placement) for i, placement in enumerate(candidate.devices)]


def _sharing(
    pipeline: ScheduledStages, candidate: Candidate, shared: StagePlanner, parts: Sequence[PlanContent]
) -> list[PlanContent]:
    """The plan of every stage where those of a worker fit together; ``parts`` are plans that do not."""
    problem, table = pipeline.problem, pipeline.table
    limit = problem.memory_limit_bytes
    stage_limit, most = limit_of_each(parts, table, limit)
    for _ in range(problem.policy.stages.shared_worker_attempts):
        options = replace(problem.options, memory_limit_bytes=stage_limit)
        within = replace(pipeline, problem=replace(problem, options=options))
        contents = _planned_stages(within, candidate, shared, BusyStages())
        if fits(problem, pipeline.sliced, contents, table):
            return contents
        needed = most_bytes(contents, pipeline.sliced, table)
        stage_limit = max(1, stage_limit - -(-(needed - limit) // most))
    raise _too_many(problem, table, needed)


def _too_many(problem: Problem, table: Table, needed: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stages that share a worker by schedule {table.name} need {bytes_text(needed)} ({needed} bytes) a device "
        f"together; the limit is {bytes_text(problem.memory_limit_bytes)}",
        remedy="fewer stages a worker, more microbatches, or schedule='1f1b'",
    )
