"""The search of pipelines: microbatches, stages, submeshes and the sharding inside each stage.

Where state lies on the stages of another plan, each operator runs where its parameters are: one cut is planned.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.ir import Graph
from autopar.microbatch import Microbatching
from autopar.plan import Plan
from autopar.schedule import get
from autopar.search.clock import Clock, units_of
from autopar.search.constraints import SharedStages
from autopar.search.outcome import Bounded
from autopar.search.pipeline.candidates import (
    Candidate,
    CuttableStep,
    all_slicings,
    candidates,
    layers_of,
    schedule_of,
    trains,
    uniform_candidate,
)
from autopar.search.pipeline.first_pipeline import fastest_of_equal_stages, first_plan
from autopar.search.pipeline.plan_candidate import mesh_shape
from autopar.search.pipeline.relaxed_pipelines import RelaxedPipelines
from autopar.search.pipeline.search_space import is_of_few_operators, is_small
from autopar.search.pipeline.stage_problem import in_flight
from autopar.search.pipeline.trials import (
    PipelineSearch,
    PipelineTrial,
    fastest_of,
    launched_s,
    nothing_planned,
    seconds_of,
)
from autopar.search.pipeline.whole_steps import by_likeness
from autopar.search.problem import Problem
from autopar.search.problem_data import is_importable
from autopar.search.source import StageSource
from autopar.search.trials import Trials
from autopar.search.worker_pool import SERIAL, WorkerPool
from autopar.sharding.registry import registered_rules
from autopar.stages.layers import forward_operators


def pipeline(problem: Problem, intra: Callable[[Problem], Plan | Bounded]) -> Plan | Bounded:
    """The best plan with several stages; `Bounded` where none is faster than the plan at hand.

    Args:
        problem: what is planned; it has a source.
        intra: plans one stage on its submesh.

    Raises:
        InfeasiblePlanError: no slicing fits.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    source = problem.source
    if source is None:
        raise InfeasiblePlanError(
            "pipeline stages were asked for, and this problem cannot be cut into stages",
            cause="it was made from a graph alone",
            remedy="plan by autopar.parallelize(...).plan(...), or with num_stages=1",
        )
    asked = problem.policy.in_second_process
    worthwhile = (not is_small(problem) if asked is None else asked) and may_run_in_worker(problem, intra)
    pool = problem.pool if worthwhile else SERIAL
    pool.begin()
    try:
        return _best(problem, source, intra, pool)
    finally:
        pool.forget()


def _best(
    problem: Problem, source: StageSource, intra: Callable[[Problem], Plan | Bounded], pool: WorkerPool
) -> Plan | Bounded:
    """`pipeline`, with a pool of workers."""
    clock, job = Clock(), problem.job
    with clock.phase("slice"):
        enumerates = job.shared_stages is None and problem.subproblem.stages_per_worker == 1
        slicings = all_slicings(problem, source) if enumerates else None
    step = CuttableStep(problem, source, intra, pool)
    search = PipelineSearch(step, clock)
    trials: Trials[PipelineTrial, Plan] = Trials(search.attempt)
    plans: list[Plan] = []
    if job.shared_stages is not None:
        plans = trials.run(
            map(PipelineTrial, shared_candidates(problem, source, job.shared_stages)), ends=lambda _: True
        )
    elif problem.subproblem.stages_per_worker > 1:
        plans = _of_two_stages_per_worker(search, trials)
    elif slicings is not None:
        cutoff_s = problem.subproblem.cutoff_s
        for slicing in slicings:
            planned = trials.run([PipelineTrial(slicing)], cutoff_s=min(map(seconds_of, plans), default=cutoff_s))
            plans += planned
            plans += [p for plan in planned for p in trials.run(_under_other_schedules(problem, slicing, plan))]
    else:
        plans = _of_few_slicings(search, trials)
    if not plans:
        return nothing_planned(problem, trials, search.bounded)
    return fastest_of(plans, clock)


def _of_few_slicings(search: PipelineSearch, trials: Trials[PipelineTrial, Plan]) -> list[Plan]:
    """Plans of the slicings of the least estimates, then with half and twice the microbatches of the fastest."""
    problem, job = search.problem, search.problem.job
    both_given = job.num_stages is not None and job.num_microbatches is not None
    is_one = both_given and schedule_of(problem).chunks == 1 and problem.subproblem.cutoff_s == math.inf
    if not is_small(problem) and not is_one:
        return _of_the_fastest_relaxed(search, trials)
    # Of a small step all are kept, for the record; of others those alone that are faster than the ones before.
    seconds = None if is_small(problem) else seconds_of
    known = [plan for plan, _ in _first(search)]
    cutoff_s = min(map(seconds_of, known), default=math.inf)
    plans: list[Plan] = []
    for candidates_of_round in _rounds(search):
        some = map(PipelineTrial, candidates_of_round)
        plans = trials.run(some, seconds=seconds, cutoff_s=cutoff_s)
        if plans or (known and trials.bounded is not None):
            break
    if not plans or job.num_microbatches is not None:
        return plans or known
    before = 0
    while before < len(plans) and _may_win(problem, plans):
        before = len(plans)
        plans += trials.run(map(PipelineTrial, _neighbours(search.step, plans)))
    return plans


def _of_the_fastest_relaxed(search: PipelineSearch, trials: Trials[PipelineTrial, Plan]) -> list[Plan]:
    """The plan of the slicing that is the fastest relaxed, in half or twice its microbatches where that is faster.

    Equal stages are relaxed in several numbers and on several meshes, else slicings of the least estimates; where none
    finds what fits, these are planned.
    """
    problem = search.problem
    relaxed = RelaxedPipelines(search.step, _first(search))
    plans: list[Plan] = []
    with search.clock.phase("relaxed pipelines"):
        best = fastest_of_equal_stages(relaxed)
    if best is not None:
        return _exactly(search, trials, *best)
    for candidates_of_round in _rounds(search):
        candidates_of_round = [c for some in candidates_of_round for c in _on_likely_meshes(problem, some)]
        with search.clock.phase("relaxed pipelines"):
            relaxed.add(candidates_of_round)
            best = relaxed.fastest()
            if best is not None and _may_win(problem, [best[0]]):
                relaxed.climb()
                best = relaxed.fastest()
        if best is not None:
            return _exactly(search, trials, *best)
        _tell_unfit(trials, relaxed)
        known = problem.subproblem.cutoff_s < math.inf
        planned = [] if known else [c for c in candidates_of_round if c not in relaxed.without_room]
        plans = trials.run(map(PipelineTrial, planned), seconds=seconds_of)
        if plans or schedule_of(problem).chunks > 1:
            break
    return plans


def _on_likely_meshes(problem: Problem, candidate: Candidate) -> list[Candidate]:
    """A candidate of equal submeshes on the two logical meshes that are most like the machine, unless it names some."""
    sizes = {size for _, size in candidate.devices}
    if candidate.meshes or problem.job.mesh_shape is not None or len(sizes) > 1:
        return [candidate]
    shapes = [mesh.shape for mesh in by_likeness(problem.cluster.part(0, *sizes))[:2]]
    return [replace(candidate, meshes=(shape,) * len(candidate.members)) for shape in shapes]


def _tell_unfit(trials: Trials[PipelineTrial, Plan], relaxed: RelaxedPipelines) -> None:
    """Adds candidates that do not fit relaxed to the failures of trials."""
    for unfit in (relaxed.unfit, relaxed.without_room):
        trials.failures.update({PipelineTrial(c): error for c, error in unfit.items()})


def _exactly(
    search: PipelineSearch, trials: Trials[PipelineTrial, Plan], relaxed: Plan, candidate: Candidate
) -> list[Plan]:
    """The plan of a candidate and its relaxed one; none where that says that it is no faster than the plan at hand.

    Stages are planned for the schedule in which the relaxed plan is the fastest: what it holds they leave free. The
    exact plan takes long next to it.
    """
    problem = search.problem
    least_s = (1 - problem.policy.effort.gap) * relaxed.step_time
    if least_s >= problem.subproblem.cutoff_s:
        trials.bounded = Bounded("its relaxed pipeline, an estimate", least_s)
        return []
    if problem.job.schedule == "auto" and candidate.schedule is None and relaxed.schedule != schedule_of(problem).name:
        candidate = replace(candidate, schedule=get(relaxed.schedule))
    candidate = replace(candidate, meshes=tuple(map(mesh_shape, relaxed.content.parts)))
    effort = problem.policy.effort.after(units_of(problem.meter))
    problem = replace(problem, policy=replace(problem.policy, effort=effort))
    planned = PipelineSearch(replace(search.step, problem=problem), search.clock, search.planned)
    exact = Trials(planned.attempt).run([PipelineTrial(candidate, is_optional=True)], cutoff_s=relaxed.step_time)
    return [*exact, relaxed]


def _first(search: PipelineSearch) -> list[tuple[Plan, Candidate]]:
    """The first even pipeline, with what it is of."""
    first = first_plan(search.step, search.clock)
    return [] if first is None else [first]


def _may_win(problem: Problem, plans: Sequence[Plan]) -> bool:
    """Whether a change of microbatches or schedule may make the fastest plan faster than the plan at hand."""
    return min(map(seconds_of, plans)) < problem.policy.partition.near_best * problem.subproblem.cutoff_s


def _rounds(search: PipelineSearch) -> Iterator[list[Candidate]]:
    """Candidates that are worth planning; the next are, where none of these fits.

    Where whole blocks do not fit, parts of them may; and where these do not, other slicings. What fits takes longer
    than the least estimate: where that is as long as a plan at hand takes, no others are tried.
    """
    tried: set[Candidate] = set()
    problem, clock = search.problem, search.clock
    policy = problem.policy.partition
    for of_blocks, others in ((True, False), (False, False), (False, True)):
        with clock.phase("slice"):
            some = candidates(search.step, of_blocks, others)
            ranked = sorted(some, key=lambda c: (c.estimate_s, c.count, len(c.members)))
        if others:
            ranked = [c for c in ranked if c not in tried][: policy.most_other]
        else:
            cutoff_s = math.inf if schedule_of(problem).chunks > 1 else problem.subproblem.cutoff_s
            least_s = min((c.estimate_s for c in ranked), default=0.0)
            every = [c for c in ranked if c.estimate_s <= policy.near_best * min(least_s, cutoff_s)]
            near = every if is_of_few_operators(problem) else every[: policy.most_near]
            if is_small(problem) and not is_of_few_operators(problem):
                near = [*near, *_best_of_each(every, {len(c.members) for c in near})]
            if ranked and not near:  # all of them take longer than a plan that is at hand
                closed = Bounded("layers as they are priced, an estimate", least_s / policy.near_best)
                search.bounded.append(closed)
                return
            ranked = near
        tried.update(ranked)
        yield ranked
        if ranked and ranked[0].estimate_s >= problem.subproblem.cutoff_s:
            return


def _best_of_each(candidates: Sequence[Candidate], planned: set[int]) -> list[Candidate]:
    """Candidate of the least estimate, by number of stages, without those ``planned``."""
    best = {len(c.members): c for c in reversed(candidates) if len(c.members) not in planned}
    return list(best.values())


def _neighbours(step: CuttableStep, plans: Sequence[Plan]) -> Iterator[Candidate]:
    """Candidates with half and twice the microbatches of the fastest plan, but those that were planned."""
    best = min(plans, key=lambda p: p.step_time)
    planned = {(p.num_stages, p.num_microbatches) for p in plans}
    for count in (best.num_microbatches // 2, 2 * best.num_microbatches):
        if count and (best.num_stages, count) not in planned:
            job = replace(step.problem.job, num_stages=best.num_stages, num_microbatches=count)
            with contextlib.suppress(MicrobatchError, ScheduleError):
                given = replace(step, problem=replace(step.problem, job=job))
                yield from itertools.islice(candidates(given, False, False), 1)


def _under_other_schedules(problem: Problem, candidate: Candidate, plan: Plan) -> Iterator[PipelineTrial]:
    """A candidate with its stages planned for another schedule than ``plan`` is, where memory is short.

    Stages that lie within the limit whatever the schedule are the same for all, and timed in all of them.
    """
    if problem.job.schedule != "auto":
        return
    below_s = launched_s(problem, plan, plan.schedule, candidate)
    below_s -= problem.policy.effort.least_gain * plan.step_time
    numbers = len(candidate.members), candidate.count
    planned = get(plan.schedule).table(*numbers)
    for schedule in map(get, problem.policy.schedules.one_stage_per_worker):
        table = schedule.table(*numbers)
        growth = [in_flight(table, s) / in_flight(planned, s) for s in range(table.num_stages)]
        held = (times * stage.memory.total for times, stage in zip(growth, plan.stages, strict=True))
        if max(held) >= problem.memory_limit_bytes:
            yield PipelineTrial(replace(candidate, schedule=schedule), below_s, is_optional=True)


def may_run_in_worker(problem: Problem, intra: Callable[[Problem], Plan | Bounded]) -> bool:
    """Whether another process would plan stages as this one does, and nobody watches how."""
    importable = is_importable(intra) and not registered_rules()
    return importable and type(problem.cost_model) is CostModel and problem.reporting.progress is None


def _of_two_stages_per_worker(search: PipelineSearch, trials: Trials[PipelineTrial, Plan]) -> list[Plan]:
    """Plans with two stages on each worker; of a step that is not small the fastest relaxed is planned exactly."""
    problem, some = search.problem, list(_with_two_stages_per_worker(search.problem, search.step.source))
    if is_small(problem) or not some:
        of_some = (PipelineTrial(candidate, is_optional=True) for candidate in some)
        return trials.run(of_some, seconds=seconds_of, cutoff_s=problem.subproblem.cutoff_s)
    relaxed = RelaxedPipelines(search.step, [])
    with search.clock.phase("relaxed pipelines"):
        relaxed.add(c for candidate in some for c in _on_likely_meshes(problem, candidate))
        best = relaxed.fastest()
    if best is None:
        _tell_unfit(trials, relaxed)
        return []
    return _exactly(search, trials, *best)


def _with_two_stages_per_worker(problem: Problem, source: StageSource) -> Iterator[Candidate]:
    """Candidates with two stages on each worker: equal runs of layers on equal submeshes."""
    policy, count = problem.policy, problem.subproblem.first_count
    (workers,) = problem.subproblem.tried_stages or ()
    layers = layers_of(problem, source, count, 2 * workers, 2 * workers)
    # What differs between schedules is which worker has a stage, and how many microbatches it keeps.
    for schedule in (get(name) for name in policy.schedules.two_stages_per_worker):
        if len(layers.members) < workers * schedule.chunks:
            continue
        with contextlib.suppress(ScheduleError):
            candidate = uniform_candidate(problem, layers, workers * schedule.chunks, schedule, count)
            if candidate is not None:
                yield replace(candidate, schedule=schedule)


def shared_candidates(problem: Problem, source: StageSource, shared: SharedStages) -> Iterator[Candidate]:
    """The cut in the other plan's number of microbatches, then in half as many and so on down to one.

    Args:
        problem: what is planned. Its schedule, where free, has forwards alone if the step has no backward pass.
        source: cuts its step.
        shared: the stages.

    Raises:
        InfeasiblePlanError: the forward pass reads the state of fewer than two stages.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    job = problem.job
    schedule = get("inference") if job.schedule == "auto" and not trains(problem) else None
    count, most = job.num_microbatches or shared.num_microbatches, 0
    while True:
        try:
            by_stage = _members(problem.graph, source.microbatches(count), shared)
        except MicrobatchError:
            if job.num_microbatches is not None or count == 1:
                raise
            by_stage = {}
        stages = sorted(by_stage)
        most = max(most, len(stages))
        if len(stages) > 1:
            yield Candidate(
                count,
                tuple(tuple(by_stage[s]) for s in stages),
                tuple(shared.devices[s] for s in stages),
                0.0,
                meshes=tuple(shared.meshes[s] for s in stages),
                schedule=schedule,
            )
        if job.num_microbatches is not None or count == 1:
            break
        count //= 2
    if most < 2:
        raise InfeasiblePlanError(
            f"the forward pass of {problem.graph.name} reads parameters of {most} of the {len(shared.devices)} stages "
            "that its state lies on",
            cause="a pipeline runs where its parameters are, on two stages or more",
            remedy="leave out like=, which moves what is read at every call",
        )


def _members(graph: Graph, microbatching: Microbatching, shared: SharedStages) -> dict[int, list[str]]:
    """Operators of the forward pass, by stage: each is on the last stage whose state was read so far."""
    forward = {op.id for op in forward_operators(graph, microbatching)}
    needed: dict[str, int] = dict(shared.inputs)
    members: dict[int, list[str]] = {}
    last = min(needed.values(), default=0)
    for op in graph.operators:
        stage = max((needed[n] for n in op.reads if n in needed), default=-1)
        if op.id in forward:
            last = max(last, stage)
            members.setdefault(last, []).append(op.id)
        elif stage >= 0:  # what is made of parameters alone, as a cast
            needed.update((v.name, stage) for v in op.results)
    return members
