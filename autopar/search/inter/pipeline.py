"""The search of pipelines: microbatches, stages, submeshes and the sharding inside each stage."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.ir.fingerprint import fingerprint
from autopar.plan import (
    Communication,
    Considered,
    InputRecord,
    OutputRecord,
    Pipeline,
    Plan,
    PlanContent,
    SearchContent,
)
from autopar.plan.text import bytes_text
from autopar.plan.types import MemoryPlace
from autopar.schedule import Table, get
from autopar.search.beside import ALONE, Beside, beginning
from autopar.search.bound import work_bound_s
from autopar.search.clock import Clock
from autopar.search.inter.candidates import (
    Candidate,
    candidates,
    even_candidate,
    fewest_blocks,
    schedule_of,
)
from autopar.search.inter.counts import is_small
from autopar.search.inter.every import every_slicing
from autopar.search.inter.memory import limit_of_each, most_bytes, with_in_flight
from autopar.search.inter.record import pipeline_of, step_record
from autopar.search.inter.schedules import (
    check_ends,
    fastest_table,
    fits,
    idle_share,
    with_starts,
)
from autopar.search.inter.shared import Known, Remembered, SharedPlans
from autopar.search.inter.stages import Chosen, in_flight, plan_stage, promise_stages
from autopar.search.problem import NotFasterError, Problem
from autopar.search.source import Sliced, StageSource
from autopar.search.told import is_own_throughout
from autopar.sharding.registry import registered_rules
from autopar.stages import cluster


def pipeline(problem: Problem, intra: Callable[[Problem], Plan]) -> Plan:
    """The best plan with several stages.

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
    large = len(problem.graph.operators) >= problem.policy.workers.least_operators
    worthwhile = large and may_be_planned_beside(problem, intra)
    with Beside(beginning(worthwhile)) as beside:
        return _best(problem, source, intra, beside)


def _best(problem: Problem, source: StageSource, intra: Callable[[Problem], Plan], beside: Beside) -> Plan:
    """`pipeline`, with what plans beside."""
    clock = Clock()
    plans: list[Plan] = []
    failures: list[InfeasiblePlanError] = []
    with clock.phase("slice"):
        every = every_slicing(problem, source)
    stages = intra if every is None else Remembered(intra)
    for found in _rounds(problem, source, beside, clock) if every is None else [every]:
        for candidate in found:
            try:
                with clock.phase("stages"):
                    plans.append(plan_candidate(problem, source, candidate, stages, beside))
                    if every is not None:
                        plans += _in_other_schedules(problem, source, candidate, plans[-1], stages)
            except InfeasiblePlanError as error:
                failures.append(error)
            asked = problem.options.num_stages is not None and problem.options.num_microbatches is not None
            if plans and asked and every is None:
                break
        if plans:
            break
    if plans and every is None and is_small(problem) and problem.options.num_microbatches is None:
        tried = 0
        while tried < len(plans):
            tried = len(plans)
            for candidate in _beside(problem, source, plans, beside):
                with clock.phase("stages"), contextlib.suppress(InfeasiblePlanError):
                    plans.append(plan_candidate(problem, source, candidate, stages, beside))
    if plans and problem.options.schedule == "auto" and problem.options.num_stages is None:
        with clock.phase("stages"):
            plans += _with_chunks(problem, source, min(plans, key=lambda p: p.step_time), intra, beside)
    if failures and not plans:
        raise failures[0]
    if not plans and problem.subproblem.cutoff_s < math.inf:
        raise NotFasterError(
            f"no pipeline of {problem.graph.name} is estimated to take less than {problem.subproblem.cutoff_s:.6g} s",
            cause="another plan is at hand that is as fast",
            remedy="ask for num_stages to have one all the same",
        )
    if not plans:
        raise InfeasiblePlanError(
            f"no way to cut {problem.graph.name} into stages fits {problem.cluster.name}",
            cause="too few layers, devices or bytes for the number of stages",
            remedy="fewer stages, more microbatches, or a higher memory_limit",
        )
    best = min(plans, key=lambda p: p.step_time)
    search = msgspec.structs.replace(best.content.search, considered=_considered(plans, best))
    return Plan(msgspec.structs.replace(best.content, search=search), clock.phases())


def _rounds(problem: Problem, source: StageSource, beside: Beside, clock: Clock) -> Iterator[list[Candidate]]:
    """Candidates that are worth planning; the next are, where none of these fits.

    Where whole blocks do not fit, parts of them may; and where these do not, other slicings of a small model.
    """
    tried: set[Candidate] = set()
    policy = problem.policy.partition
    ways_to_slice = [(lambda stages: fewest_blocks(problem, stages), False), (None, False), (None, True)]
    for fewest, others in ways_to_slice if is_small(problem) else ways_to_slice[:2]:
        with clock.phase("slice"):
            found = sorted(
                candidates(problem, source, fewest, beside, others),
                key=lambda c: (c.estimate_s, c.count, len(c.members)),
            )
        if others:
            found = [c for c in found if c not in tried][: policy.most_other]
        else:
            cutoff_s = math.inf if schedule_of(problem).chunks > 1 else problem.subproblem.cutoff_s
            near = [c for c in found if c.estimate_s <= policy.near_best * min(found[0].estimate_s, cutoff_s)]
            near = near[: policy.most_near]
            if is_small(problem) and near:
                near += _best_of_each(
                    found, {len(c.members) for c in near}, policy.far * min(found[0].estimate_s, cutoff_s)
                )
            if found and not near:  # all of them take longer than a plan that is at hand
                return
            found = near
        tried.update(found)
        yield found


def _best_of_each(found: Sequence[Candidate], planned: set[int], most_s: float) -> list[Candidate]:
    """By number of stages, but those ``planned``, the candidate of the least estimate up to ``most_s``."""
    best = {len(c.members): c for c in reversed(found) if len(c.members) not in planned}
    return [c for c in best.values() if c.estimate_s <= most_s]


def _beside(problem: Problem, source: StageSource, plans: Sequence[Plan], beside: Beside) -> Iterator[Candidate]:
    """Candidates with half and twice the microbatches of the fastest plan, but those that were planned."""
    best = min(plans, key=lambda p: p.step_time)
    known = {(p.num_stages, p.num_microbatches) for p in plans}
    for count in (best.num_microbatches // 2, 2 * best.num_microbatches):
        if count and (best.num_stages, count) not in known:
            options = replace(problem.options, num_stages=best.num_stages, num_microbatches=count)
            with contextlib.suppress(MicrobatchError, ScheduleError):
                yield from itertools.islice(
                    candidates(replace(problem, options=options), source, None, beside, False), 1
                )


def _in_other_schedules(
    problem: Problem, source: StageSource, candidate: Candidate, plan: Plan, intra: Callable[[Problem], Plan]
) -> Iterator[Plan]:
    """Plans of a candidate whose stages are planned for another schedule than ``plan`` is, where memory is short.

    Stages that lie within the limit whatever the schedule are the same for all, and timed in all of them.
    """
    policy = problem.policy.schedules
    if (
        problem.options.schedule != "auto"
        or policy.most_activation_growth * plan.peak_memory < problem.memory_limit_bytes
    ):
        return
    least_s = with_starts(policy, plan.step_time, get(plan.schedule).table(plan.num_stages, plan.num_microbatches))
    for name in policy.one_stage_per_worker:
        with contextlib.suppress(ScheduleError, InfeasiblePlanError):
            other = plan_candidate(problem, source, replace(candidate, schedule=get(name)), intra)
            table = get(name).table(plan.num_stages, plan.num_microbatches)
            if with_starts(policy, other.step_time, table) < least_s - policy.least_gain * plan.step_time:
                yield other


def _considered(plans: Sequence[Plan], best: Plan) -> tuple[Considered, ...]:
    """The fastest plan of each kind."""
    kinds: dict[str, Plan] = {}
    for p in sorted(plans, key=lambda p: p.step_time):
        kinds.setdefault(f"{p.num_stages} stages, {p.num_microbatches} microbatches, {p.schedule}", p)
    return tuple(
        Considered(name, p.step_time, p.peak_memory, "chosen" if p is best else "") for name, p in kinds.items()
    )


def may_be_planned_beside(problem: Problem, intra: Callable[[Problem], Plan]) -> bool:
    """Whether another process would plan stages as this one does, and nobody watches how."""
    own = is_own_throughout(intra) and not registered_rules()
    return own and type(problem.cost_model) is CostModel and problem.reporting.progress is None


def _with_chunks(
    problem: Problem, source: StageSource, best: Plan, intra: Callable[[Problem], Plan], beside: Beside
) -> Iterable[Plan]:
    """Plans with two stages on each worker, where the workers of ``best``, with one, wait for long."""
    workers, count = best.num_stages, best.num_microbatches
    policy = problem.policy
    if idle_share(best) < policy.schedules.long_idle_share:
        return
    found = source.microbatches(count)
    wanted = min(policy.enumeration.layers_per_stage * workers, policy.enumeration.most_layers)
    layers = cluster(problem.graph, found, wanted, fewest=None)
    # What differs between schedules is which worker has a stage, and how many microbatches it holds.
    known: dict[tuple[tuple[str, ...], ...], Known] = {}
    for schedule in (get(name) for name in policy.schedules.two_stages_per_worker):
        if len(layers.members) < workers * schedule.chunks:
            continue
        with contextlib.suppress(ScheduleError, InfeasiblePlanError):
            candidate = even_candidate(problem, layers, workers * schedule.chunks, schedule, count)
            if candidate is not None:
                planned = replace(candidate, schedule=schedule)
                yield plan_candidate(problem, source, planned, intra, beside, known.setdefault(planned.members, {}))


def plan_candidate(
    problem: Problem,
    source: StageSource,
    candidate: Candidate,
    intra: Callable[[Problem], Plan],
    beside: Beside = ALONE,
    known: Known | None = None,
) -> Plan:
    """The exact plan of a candidate: every stage planned on its submesh, the whole simulated.

    Args:
        problem: the whole.
        source: of its step.
        candidate: stages and their devices.
        intra: plans one stage on its submesh.
        beside: plans some of them.
        known: plans of stages of other candidates with the same stages; those that are made here are added.
    """
    sliced = source.slice(candidate.count, candidate.members)
    schedule = candidate.schedule or schedule_of(problem)
    table = schedule.table(len(candidate.members), candidate.count)
    check_ends(problem.graph, sliced, table)
    shared = SharedPlans(intra, candidate.meshes, beside, {} if known is None else known)
    chosen = Chosen(problem, source, sliced, candidate.members, candidate.layers, table)
    parts = _planned_stages(chosen, candidate, shared)
    if not fits(problem, sliced, parts, table):  # each stage does, and some worker has several
        parts = _sharing(chosen, candidate, shared, parts)
    if candidate.schedule is None and problem.options.schedule == "auto":
        table = fastest_table(problem, sliced, parts, table)
    return assemble(problem, candidate, sliced, parts, table)


def _planned_stages(chosen: Chosen, candidate: Candidate, shared: SharedPlans) -> list[PlanContent]:
    """The plan of every stage, on its devices."""
    # With the fewest microbatches in flight first: what is best there is best for stages alike that it fits too.
    order = sorted(range(len(candidate.members)), key=lambda i: (in_flight(chosen.table, i), i))
    promise_stages(chosen, order, candidate.devices, shared)
    found = {i: plan_stage(chosen, i, candidate.devices[i], shared) for i in order}
    return [_on_devices(found[i], i, home) for i, home in enumerate(candidate.devices)]


def _sharing(
    chosen: Chosen, candidate: Candidate, shared: SharedPlans, parts: Sequence[PlanContent]
) -> list[PlanContent]:
    """The plan of every stage where those of a worker fit together; ``parts`` are plans that do not."""
    problem, table = chosen.problem, chosen.table
    limit = problem.memory_limit_bytes
    own, most = limit_of_each(parts, table, limit)
    for _ in range(problem.policy.stages.shared_worker_attempts):
        options = replace(problem.options, memory_limit_bytes=own)
        found = _planned_stages(replace(chosen, problem=replace(problem, options=options)), candidate, shared)
        if fits(problem, chosen.sliced, found, table):
            return found
        needed = most_bytes(found, chosen.sliced, table)
        own = max(1, own - -(-(needed - limit) // most))
    raise _too_many(problem, table, needed)


def _too_many(problem: Problem, table: Table, needed: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stages that share a worker by schedule {table.name} need {bytes_text(needed)} ({needed} bytes) a device "
        f"together; the limit is {bytes_text(problem.memory_limit_bytes)}",
        remedy="fewer stages a worker, more microbatches, or schedule='1f1b'",
    )


def assemble(
    problem: Problem, candidate: Candidate, sliced: Sliced, parts: Sequence[PlanContent], table: Table
) -> Plan:
    """The plan of all stages together; ``parts`` are theirs, on their devices."""
    graph = problem.graph
    seconds, record = step_record(table, *pipeline_of(graph, sliced, parts, table, problem.cluster))
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
        choices=tuple(x for c in parts for x in c.choices),
        search=SearchContent(parts[0].search.strategy, seconds, work_bound_s(graph, problem.cluster)),
        notes=tuple(dict.fromkeys(n for c in parts for n in c.notes)),
        memory_limit=problem.memory_limit_bytes,
        donated=tuple(i.name for i in graph.inputs if i.name in problem.options.donated),
        pipeline=record,
        cuts=tuple(m[-1] for m in candidate.members[:-1]),
        parts=tuple(_on_devices(c, 0, (0, len(c.stages[0].devices))) for c in parts),
    )
    plan = Plan(content)
    problem.offer(plan)
    return plan


def _on_devices(content: PlanContent, stage: int, home: tuple[int, int]) -> PlanContent:
    """A stage's plan with its devices' numbers in the cluster and its own number."""
    own = content.stages[0]
    placed = msgspec.structs.replace(
        own,
        devices=tuple(range(home[0], home[0] + home[1])),
        collectives=tuple(msgspec.structs.replace(c, stage=stage) for c in own.collectives),
    )
    return msgspec.structs.replace(content, stages=(placed,))


def _with_sends(content: PlanContent, stage: int, record: Pipeline, count: int, sliced: Sliced) -> PlanContent:
    """A stage's plan with what it sends to other stages among its communication."""
    own = content.stages[0]
    whole_bytes = {v.name: v.bytes * len(own.devices) for v in record.values}
    sends = [
        Communication("send", whole_bytes[t.value], "stages", float(count), stage, count * t.seconds)
        for t in record.transfers
        if t.value in sliced.parts[stage].sent
    ]
    works = (*sliced.map.body.items(), *sliced.map.update.items())
    sending = msgspec.structs.replace(
        own,
        collectives=(*own.collectives, *sends),
        operators=tuple(id for id, stages in works if stage in stages),
    )
    return msgspec.structs.replace(content, stages=(sending,))


def _records(
    problem: Problem, sliced: Sliced, parts: Sequence[PlanContent]
) -> tuple[tuple[InputRecord, ...], tuple[OutputRecord, ...]]:
    """Records of the step's inputs and outputs, each on the first stage that has it."""
    graph = problem.graph
    layouts: dict[str, tuple[int, str, MemoryPlace]] = {}
    returned: dict[int, tuple[int, str]] = {}
    for p, content in zip(sliced.parts, parts, strict=True):
        for r in content.inputs:
            name = r.path.removeprefix("piece/")
            if name in sliced.map.inputs and not r.path.startswith(("from/", "late/")):
                layouts.setdefault(name, (p.stage, r.layout, r.memory))
        for index, record in zip(p.outputs, content.outputs, strict=False):
            returned[index] = (p.stage, record.layout)
    whole = "[{}]"
    inputs = tuple(
        InputRecord(i.name, str(i.type), i.role, layout, stage, memory)
        for i in graph.inputs
        for stage, layout, memory in [layouts.get(i.name, (0, whole.format(",".join("." * i.type.rank)), "device"))]
    )
    outputs = tuple(
        OutputRecord(o.path, str(o.type), returned[n][1], o.updates, returned[n][0])
        for n, o in enumerate(graph.outputs)
    )
    return inputs, outputs
