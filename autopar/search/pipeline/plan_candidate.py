"""`plan_candidate`: the exact plan of one slicing of a step into stages, and its bound from those planned so far."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan import (
    Plan,
    PlanContent,
)
from autopar.plan.text import bytes_text
from autopar.schedule import Table
from autopar.schedule.zero_bubble import bubble_left
from autopar.search.outcome import Bounded, within_reach
from autopar.search.pipeline.candidates import (
    Candidate,
    CuttableStep,
    has_stage_a_worker,
    schedule_for,
    table_for,
)
from autopar.search.pipeline.compose import compose, on_devices
from autopar.search.pipeline.isomorphic_stages import StagePlanner
from autopar.search.pipeline.memory import limit_of_each, most_bytes
from autopar.search.pipeline.schedules import (
    check_ends,
    fastest_table,
    fits,
)
from autopar.search.pipeline.search_space import is_small
from autopar.search.pipeline.stage import cost_of_limit_s, plan_stage, submit_like, submit_stages
from autopar.search.pipeline.stage_problem import PlacedStage, ScheduledStages, in_flight
from autopar.search.problem import Problem
from autopar.search.store import Key, Store


def plan_candidate(step: CuttableStep, candidate: Candidate, cutoff_s: float = math.inf) -> Plan | Bounded:
    """The exact plan of a candidate: every stage planned on its submesh, the whole simulated.

    `Bounded` where stages that are planned show that it takes ``cutoff_s`` or more.

    Args:
        step: the whole.
        candidate: stages and their devices.
        cutoff_s: seconds from which the plan is of no use.

    Raises:
        InfeasiblePlanError: a stage does not fit.
        ScheduleError: examples meet, and the schedule asked for has no moment for that.
    """
    problem, microbatching = step.problem, step.source.microbatches(candidate.count)
    schedule = candidate.schedule or schedule_for(problem, microbatching)
    table = table_for(schedule, len(candidate.members), microbatching)
    source = step.source.with_stages_after(table.after)
    sliced = source.slice(candidate.count, candidate.members)
    check_ends(problem.graph, sliced, table)
    shared = StagePlanner(
        step.intra,
        candidate.meshes,
        step.pool,
        any_that_fits=candidate.shares_plans,
        relaxed=candidate.shares_plans,
    )
    # A relaxation says soon whether workers have room for several stages, each taken to be like the others.
    together = candidate.shares_plans and not has_stage_a_worker(table) and not table.after
    pipeline = ScheduledStages(problem, source, sliced, candidate.members, candidate.layers, table, together)
    parts = _planned_stages(pipeline, candidate, shared, cutoff_s)
    if isinstance(parts, Bounded):
        return parts
    if not fits(problem, sliced, parts, table):  # each stage does, and some worker has several
        parts = _sharing(pipeline, candidate, shared, parts)
    if candidate.schedule is None and problem.job.schedule == "auto":
        table = fastest_table(problem, sliced, parts, table)
    return compose(problem, candidate, sliced, parts, table)


def _planned_stages(
    pipeline: ScheduledStages,
    candidate: Candidate,
    shared: StagePlanner,
    cutoff_s: float = math.inf,
) -> list[PlanContent] | Bounded:
    """The plan of every stage, on its devices. `Bounded` where the pipeline takes ``cutoff_s`` or more."""
    order = _in_order(pipeline, relaxed=candidate.shares_plans)
    # Relaxations go on as long as those that are there say that it may be of use.
    relaxes_first = candidate.shares_plans and cutoff_s < math.inf and has_stage_a_worker(pipeline.table)
    keys, store = dict[int, Key](), pipeline.problem.store
    if cutoff_s < math.inf and not candidate.shares_plans:
        problem, count = pipeline.problem, candidate.count
        parts = {i: problem.cluster.part(*candidate.devices[i]) for i in order}
        keys = {i: shared.busy_key(problem, pipeline.sliced.graphs[i], parts[i], count) for i in order}
        if (closed := closed_by_busy(store, keys, pipeline.table, cutoff_s)) is not None:
            return closed
    # Branches are planned exactly at once: a stage that takes as long alone ends them.
    of_use_s = cutoff_s if relaxes_first or pipeline.table.after else math.inf
    if not relaxes_first:
        submit_stages(pipeline, order, candidate.devices, shared, of_use_s)
    # Of relaxations on equal submeshes all are tried first on the mesh of the stage that most are like.
    is_even = len({size for _, size in candidate.devices}) == 1
    contents: dict[int, PlanContent] = {}
    by_kind, tightest = dict[int, StagePlanner](), dict[int, int]()
    for n, i in enumerate(order):
        kind = pipeline.first(i)
        planner = by_kind.get(kind, shared)
        if not candidate.shares_plans and kind in by_kind and not _may_take(pipeline, i, tightest[kind]):
            planner = shared
        answer = plan_stage(PlacedStage(pipeline, i, candidate.devices[i]), planner, of_use_s)
        if isinstance(answer, Bounded):
            return answer
        contents[i] = answer
        if n == 0 and shared.relaxed and is_even:
            shared = replace(shared, meshes=(mesh_shape(answer),) * len(order))
        if kind not in by_kind:
            isomorphic = [j for j in order[n + 1 :] if pipeline.first(j) == kind]
            tightest[kind] = i
            by_kind[kind] = replace(shared, any_that_fits=_may_share(pipeline, candidate, contents[i], i))
            if not by_kind[kind].any_that_fits:
                submit_like(pipeline, contents[i], isomorphic, candidate.devices, shared, of_use_s)
            if relaxes_first and (closed := _closed_by_relaxations(pipeline, contents, cutoff_s)) is not None:
                return closed
        if relaxes_first and n == 0:
            others = [j for j in order if pipeline.first(j) != kind]
            submit_stages(pipeline, others, candidate.devices, shared, cutoff_s)
        if keys:
            keep_busy(store, keys[i], answer)
            if (closed := closed_by_busy(store, keys, pipeline.table, cutoff_s)) is not None:
                return closed
    return [on_devices(contents[i], i, placement) for i, placement in enumerate(candidate.devices)]


def _in_order(pipeline: ScheduledStages, *, relaxed: bool) -> list[int]:
    """Stages as they are planned.

    Those with the fewest microbatches in flight come first: what is best there is best for isomorphic stages that it
    fits too. Of relaxations, whose plans serve all that they fit, those come first that most are like, with the most in
    flight. Of large steps the one of each kind with the most comes first: others may do with its plan.
    """
    stages = range(len(pipeline.members))
    members = Counter(map(pipeline.first, stages))
    flying = {i: in_flight(pipeline.table, i) for i in stages}
    if relaxed:
        return sorted(stages, key=lambda i: (-members[pipeline.first(i)], -flying[i], i))
    order = sorted(stages, key=lambda i: (flying[i], i))
    if is_small(pipeline.problem):
        return order
    tightest = set({pipeline.first(i): i for i in sorted(stages, key=lambda i: (flying[i], -i))}.values())
    return sorted(order, key=lambda i: i not in tightest)


def _closed_by_relaxations(
    pipeline: ScheduledStages, contents: Mapping[int, PlanContent], cutoff_s: float
) -> Bounded | None:
    """Message that a pipeline takes ``cutoff_s`` by estimates of some stages; None where it may not."""
    first = [pipeline.first(stage) for stage in range(len(pipeline.members))]
    least_s = least_relaxation_s(contents, first, pipeline.table.num_microbatches, bubble_left())
    return Bounded("relaxations of its kinds of stages", least_s) if least_s >= cutoff_s else None


def _may_share(pipeline: ScheduledStages, candidate: Candidate, content: PlanContent, stage: int) -> bool:
    """Whether others of its kind take the plan of the stage with the most microbatches in flight where it fits.

    Relaxations do; of large steps plans where others, with more room, would save next to nothing: with f of F
    microbatches in flight a stage is taken to save (1 - f / F) of what the memory limit costs. All of a step waits for
    the worker that is busy for the longest, and the first microbatch for every stage.

    Args:
        pipeline: what is planned.
        candidate: its stages.
        content: the plan of the stage.
        stage: its number.
    """
    if candidate.shares_plans or is_small(pipeline.problem):
        return candidate.shares_plans
    table, kind, cost_s = pipeline.table, pipeline.first(stage), cost_of_limit_s(content)
    if not cost_s < math.inf:
        return False
    sum_s, most = cost_s + (content.search.unlimited_s or 0.0), in_flight(table, stage)
    saved = {
        i: cost_s * (1 - in_flight(table, i) / most)
        for i in range(len(pipeline.members))
        if pipeline.first(i) == kind and _may_take(pipeline, i, stage)
    }
    workers = [[i for i in table.stages_of_worker(w) if i in saved] for w in range(table.num_workers)]
    busiest_s = sum_s * max(map(len, workers))
    with_room_s = max(sum(sum_s - saved[i] for i in stages) for stages in workers)
    longer_s = busiest_s - with_room_s + sum(saved.values()) / table.num_microbatches
    return longer_s <= pipeline.problem.policy.effort.gap * busiest_s


def _may_take(pipeline: ScheduledStages, stage: int, tightest: int) -> bool:
    """Whether a stage may take the plan of the one of its kind with the most microbatches in flight.

    Where workers have one stage, those with less than half as many in flight are planned: they are next to the last,
    and what they take longer is hidden by few microbatches.
    """
    table = pipeline.table
    return not has_stage_a_worker(table) or 2 * in_flight(table, stage) >= in_flight(table, tightest)


def _sharing(
    pipeline: ScheduledStages, candidate: Candidate, shared: StagePlanner, parts: Sequence[PlanContent]
) -> list[PlanContent]:
    """The plan of every stage where those of a worker fit together; ``parts`` are plans that do not.

    Of large steps each stage is planned with room for the other stages of its worker, as if they were like it: what
    lasts counts once for each of them, what passes once. Else, and where that does not fit, each has a limit of its
    own, less and less: a plan may keep it by what passes, which does not help the others.
    """
    problem, table = pipeline.problem, pipeline.table
    limit = problem.memory_limit_bytes
    attempts = problem.policy.stages.limit_attempts
    if pipeline.together or not is_small(problem):
        with contextlib.suppress(InfeasiblePlanError):
            return _within_limits(replace(pipeline, together=True), candidate, shared, limit, attempts)
    alone = replace(pipeline, together=False)
    return _within_limits(alone, candidate, shared, limit_of_each(parts, table, limit), attempts)


def _within_limits(
    pipeline: ScheduledStages, candidate: Candidate, shared: StagePlanner, stage_limit: int, attempts: int
) -> list[PlanContent]:
    """The plan of every stage within the first limit, from ``stage_limit`` on, in which those of a worker fit together.

    Args:
        pipeline: what is planned.
        candidate: its stages.
        shared: plans one stage on its submesh.
        stage_limit: bytes a device of a stage.
        attempts: limits that are tried.

    Raises:
        InfeasiblePlanError: in none of them they do.
    """
    problem, table, contents = pipeline.problem, pipeline.table, list[PlanContent]()
    for _ in range(attempts):
        contents = within_reach(_planned_stages(_within(pipeline, stage_limit), candidate, shared))
        if fits(problem, pipeline.sliced, contents, table):
            return contents
        needed = most_bytes(contents, pipeline.sliced, table)
        most = 1 if pipeline.together else max(len(table.stages_of_worker(w)) for w in range(table.num_workers))
        stage_limit = max(1, stage_limit - -(-(needed - problem.memory_limit_bytes) // most))
    raise _too_many(problem, table, most_bytes(contents, pipeline.sliced, table))


def _within(pipeline: ScheduledStages, limit_bytes: int) -> ScheduledStages:
    """A pipeline each of whose stages has a memory limit of its own."""
    job = replace(pipeline.problem.job, memory_limit_bytes=limit_bytes)
    return replace(pipeline, problem=replace(pipeline.problem, job=job))


def _too_many(problem: Problem, table: Table, needed: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stages that share a worker by schedule {table.name} need {bytes_text(needed)} ({needed} bytes) a device "
        f"together; the limit is {bytes_text(problem.memory_limit_bytes)}",
        remedy="fewer stages a worker, more microbatches, or schedule='1f1b'",
    )


def mesh_shape(content: PlanContent) -> tuple[int, ...]:
    """Shape of the logical mesh of a stage's plan."""
    return tuple(n for _, n in content.stages[0].mesh_axes)


def keep_busy(store: Store, key: Key, content: PlanContent) -> None:
    """Keeps what the plan of a stage takes, unless a memory limit had a part in it."""
    times = dict(content.stages[0].work_times)
    if times and not content.memory_bound:
        forward_s = times.get("forward", 0.0)
        busy_s = forward_s + times.get("backward", 0.0) + times.get("meeting", 0.0) + times.get("update", 0.0)
        store.once(key, lambda: (forward_s / content.num_microbatches, busy_s))


def least_busy_s(store: Store, keys: Mapping[int, Key], table: Table) -> float:
    """Seconds that a pipeline takes at least; 0.0 where none of its stages was planned.

    A stage begins when the first microbatch has passed the stages that it waits for, and a worker runs its stages one
    after the other.

    Args:
        store: has what stages take.
        keys: of its stages, by number.
        table: which stages wait for which, and on which worker each is.
    """
    passed_s, least_s, of_worker = dict[int, float](), 0.0, dict[int, float]()
    for stage in sorted(keys):
        forward_s, busy_s = store.get(keys[stage], (0.0, 0.0))
        begins_s = max((passed_s[s] for s in table.stages_before(stage)), default=0.0)
        passed_s[stage] = begins_s + forward_s
        workers = table.workers_of_stage(stage)
        for worker in workers:
            of_worker[worker] = of_worker.get(worker, 0.0) + busy_s / len(workers)
        least_s = max(least_s, begins_s + busy_s / max(1, len(workers)), *of_worker.values())
    return least_s


def closed_by_busy(store: Store, keys: Mapping[int, Key], table: Table, cutoff_s: float) -> Bounded | None:
    """Verdict that a pipeline takes ``cutoff_s`` or more, by the busy seconds of its planned stages; else None.

    Args:
        store: answers of the search, of which planned stages are some.
        keys: by number of a stage its key in ``store``.
        table: of its schedule.
        cutoff_s: seconds of the best plan so far.
    """
    least_s = least_busy_s(store, keys, table)
    return Bounded("what its stages that are planned take", least_s) if least_s >= cutoff_s else None


def least_relaxation_s(contents: Mapping[int, PlanContent], first: Sequence[int], count: int, left: float) -> float:
    """Seconds of a pipeline whose stages take as long as those of their kinds that are planned: an estimate, no bound.

    The slowest stage does all its work and waits for a share of one microbatch of every other, which weight gradients
    do not fill.

    Args:
        contents: plans of stages, by their number.
        first: for each stage the first that it is isomorphic to.
        count: microbatches.
        left: the share.
    """
    by_kind = {first[i]: dict(content.stages[0].work_times) for i, content in contents.items()}
    loops_s, busy_s = list[float](), list[float]()
    for kind in first:
        times = by_kind.get(kind, {})
        loops_s.append(times.get("forward", 0.0) + times.get("backward", 0.0))
        busy_s.append(loops_s[-1] + times.get("meeting", 0.0) + times.get("update", 0.0))
    total_s = sum(loops_s)
    return max(busy + left / count * (total_s - loop) for busy, loop in zip(busy_s, loops_s, strict=True))
